"""Plans side by side as one table; what differs from the first job is marked, with by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from mpctl.render.console import get_console, plain_table
from mpctl.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from mpctl.errors import IssueEntry
    from mpctl.planning.compare import CompareDocument

# What settings and figures are called where their key says too little.
TITLES = {
    "global_batch_size": "global batch",
    "micro_batch_size": "micro batch",
    "micro_batches": "micro batches a step",
    "zero": "ZeRO",
    "peak_bytes": "memory on the device",
    "step_seconds": "step time",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
}
DTYPE = ("dtype", "dtype_is_auto")
UNSHOWN = (*DTYPE, "runtime_is_default")  # DTYPE is one row
FITS = {True: "yes", False: "no", None: "not known"}
RUNS = {True: "yes", False: "! no, planned as if"}
LEAST_DIFFERENCE = 0.0005  # of a figure: below it, rounding hides the difference
NOTE = "≠ a setting and +x% a figure that differs from the first job's"


def print_comparison(document: CompareDocument) -> None:
    """Print settings of training, other settings that differ, and figures: a column a job."""
    table = plain_table("", ("", *document["jobs"]), left=("",))
    table.columns[0].no_wrap = True
    _add_rows(table, _setting_rows(document))
    table.add_section()
    table.add_row("fits", *(FITS[fits] for fits in document["fits"]))
    if not all(document["runs"]):
        table.add_row("its runtime runs it", *(RUNS[runs] for runs in document["runs"]))
    _add_rows(table, _figure_rows(document["figures"]))
    console = get_console()
    console.print(table)
    console.print(NOTE, style="dim")
    for jobs, warning in _warnings(document):
        said = f"{warning['rule']}: {warning['message']} → {warning['hint']}"
        console.print(Text.assemble(("!  ", "yellow"), (jobs, "bold"), said.removesuffix(" → ")))


def _warnings(document: CompareDocument) -> Iterator[tuple[str, IssueEntry]]:
    """What `mpctl plan` warns of, once each; before it the jobs that it is about, if not all."""
    names = document["jobs"]
    found: dict[str, tuple[list[str], IssueEntry]] = {}
    for name, warnings in zip(names, document["warnings"], strict=True):
        for warning in warnings:
            found.setdefault(str(warning), ([], warning))[0].append(name)
    for jobs, warning in found.values():
        yield "" if len(jobs) == len(names) else f"{' and '.join(jobs)}: ", warning


def _add_rows(table: Table, rows: Iterator[tuple[str, list[str]]]) -> None:
    for title, cells in rows:
        table.add_row(title, *cells)


def _setting_rows(document: CompareDocument) -> Iterator[tuple[str, list[str]]]:
    training: list[Mapping[str, object]] = [*document["training"]]
    cells = _setting_cells([settings["dtype"] for settings in training])
    autos = [" (auto)" if settings["dtype_is_auto"] else "" for settings in training]
    yield "dtype", [cell + auto for cell, auto in zip(cells, autos, strict=True)]
    for key in (key for key in training[0] if key not in UNSHOWN):
        yield TITLES.get(key, key), _setting_cells([settings[key] for settings in training])
    shown = {"parallel.zero", *(f"training.{key}" for key in training[0])}
    for name, values in document["settings"].items():
        if name not in shown:
            yield name, _setting_cells(values)


def _setting_cells(values: Sequence[object]) -> list[str]:
    """Each job's value, marked where it differs from the first job's."""
    return [_setting_text(v) if v == values[0] else f"≠ {_setting_text(v)}" for v in values]


def _setting_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else str(value)


def _figure_rows(jobs: Sequence[Mapping[str, float | None]]) -> Iterator[tuple[str, list[str]]]:
    names = dict.fromkeys(name for figures in jobs for name in figures)
    for name in (name for name in names if not name.startswith("bytes.")):  # of whole messages
        values = [figures.get(name) for figures in jobs]
        if any(values):
            yield _figure_title(name), _figure_cells(name, values)


def _figure_title(name: str) -> str:
    """`seconds.tp` -> `time: tp`, `sent_bytes.tp` -> `sent by a rank: tp`."""
    kind, _, part = name.partition(".")
    titles = {"seconds": "time", "sent_bytes": "sent by a rank"}
    return f"{titles[kind]}: {part}" if part else TITLES.get(name, name)


def _figure_cells(name: str, values: Sequence[float | None]) -> list[str]:
    """Each job's figure, with its difference from the first job's: `(+7.5%) 26.3 s`."""
    text, first = _formatter(name), values[0]
    cells = []
    for value in values:
        cell = "-" if value is None else text(value)
        if value is not None and first and abs(value / first - 1) > LEAST_DIFFERENCE:
            cell = f"({value / first - 1:+.1%}) {cell}"
        cells.append(cell)
    return cells


def _formatter(name: str) -> Callable[[float], str]:
    """How a figure of this name is written."""
    kind = name.partition(".")[0]
    if kind in ("seconds", "step_seconds"):
        return seconds_text
    if kind in ("sent_bytes", "peak_bytes"):
        return bytes_text
    exact: dict[str, Callable[[float], str]] = {"ranks": "{:,}".format, "mfu": "{:.1%}".format}
    return exact.get(name, count_text)
