"""Plans side by side as one table; what differs from the first is marked by how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpctl.render.console import get_console, plain_table
from mpctl.units import bytes_text, count_text, seconds_text

NAMES = {
    "global_batch_size": "global batch", "micro_batch_size": "micro batch",
    "micro_batches": "micro batches a step", "zero": "ZeRO", "peak_bytes": "memory on the device",
    "step_seconds": "step time", "tokens_per_second": "tokens/s", "mfu": "MFU",
}  # fmt: skip
SAME = 0.0005  # of a figure: what rounding hides


def print_comparison(document: dict[str, Any]) -> None:
    """Training, what else differs, and figures; on stdout, a column a job."""
    table = plain_table("", ("", *document["jobs"]), left=("",))
    table.columns[0].no_wrap = True
    shown = {f"training.{key}": key for key in document["training"][0]}
    shown["parallel.zero"] = "zero"
    for key in document["training"][0]:
        values = [own[key] for own in document["training"]]
        table.add_row(NAMES.get(key, key), *(_setting(value, values[0]) for value in values))
    for name, values in document["settings"].items():
        if name not in shown:
            table.add_row(name, *(_setting(value, values[0]) for value in values))
    table.add_section()
    table.add_row("fits", *({True: "yes", False: "no", None: "not known"}[fits]
                            for fits in document["fits"]))  # fmt: skip
    figures = document["figures"]
    for name in dict.fromkeys(key for own in figures for key in own):
        values = [own.get(name) for own in figures]
        if any(values):
            table.add_row(_name(name), *_figures(name, values))
    console = get_console()
    console.print(table)
    console.print("≠ a setting and +x% a figure that differs from the first job's", style="dim")


def _name(name: str) -> str:
    """`seconds.tp` -> `time: tp`, `bytes.tp` -> `sent in a step: tp`."""
    kind, _, part = name.partition(".")
    titles = {"seconds": "time", "bytes": "sent in a step"}
    return f"{titles[kind]}: {part}" if part else NAMES.get(name, name)


def _setting(value: Any, first: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "-" if value is None else str(value)
    return text if value == first else f"≠ {text}"


def _figures(name: str, values: Sequence[float | None]) -> list[str]:
    text, first = _text(name), values[0]
    cells = []
    for value in values:
        cell = "-" if value is None else text(value)
        if value is not None and first and abs(value / first - 1) > SAME:
            cell = f"({value / first - 1:+.1%}) {cell}"
        cells.append(cell)
    return cells


def _text(name: str) -> Callable[[float], str]:
    if name == "ranks":
        return "{:,}".format
    if "seconds" in name and not name.endswith("per_second"):
        return seconds_text
    if "bytes" in name:
        return bytes_text
    return (lambda value: f"{value:.1%}") if name == "mfu" else count_text
