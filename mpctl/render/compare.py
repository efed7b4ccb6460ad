"""Plans side by side: jobs, one layout under several runtimes, modes of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mpctl.core.units import MFU_CONVENTION, bytes_text, count_text, seconds_text
from mpctl.plan.planning.gates import FIGURES as FIGURES_OF_GATES
from mpctl.plan.planning.runtimes import UnderRuntime
from mpctl.plan.planning.summary import plan_summary, training_line
from mpctl.plan.planning.tensor_modes import COSTS
from mpctl.render.parts import Column, DataTable, Lines, Part, Sentence, Style, table_of
from mpctl.render.terminal import print_parts
from mpctl.spec.figure_sources import sources_text

if TYPE_CHECKING:
    from mpctl.core.errors import IssueEntry
    from mpctl.plan.planning.compare import CompareDocument
    from mpctl.plan.planning.gates import GateEntry
    from mpctl.plan.planning.tensor_modes import TensorModeEntry, TensorModesDocument


Note = TypeVar("Note")
# Titles of settings and figures whose key is not clear enough.
TITLES = {
    "global_batch_size": "global batch",
    "micro_batch_size": "micro batch",
    "micro_batches": "micro batches a step",
    "zero": "ZeRO",
    "peak_bytes": "on device",
    "step_seconds": "step time",
    "tokens_per_second": "tokens/s",
    "mfu": f"MFU, {MFU_CONVENTION}",
    "price_per_billion_tokens": "price/Gtok",
}
DTYPE = ("dtype", "dtype_is_auto")
UNSHOWN = (*DTYPE, "runtime_is_default")  # DTYPE is one row
BAND = ("low_seconds", "high_seconds")  # one row
FITS = {True: "yes", False: "no", None: "not known"}
RUNS = {True: "yes", False: "! no, planned as if"}
LEAST_DIFFERENCE = 0.0005  # of a figure: below it, rounding hides the difference
NOTE = "≠ a setting and +x% a figure that differs from the first job's"


def print_comparison(document: CompareDocument) -> None:
    """Print settings of training, other settings that differ, and figures: one column per job."""
    print_parts(comparison_parts(document))


def comparison_parts(document: CompareDocument) -> Iterator[Part]:
    rows = [*_setting_rows(document), ["fits", *(FITS[fits] for fits in document["fits"])]]
    if not all(document["runs"]):
        rows.append(["its runtime runs it", *(RUNS[runs] for runs in document["runs"])])
    rows += _figure_rows(document["figures"])
    costs = [f"{name}: {cost}" for name, cost in zip(document["jobs"], document["costs"], strict=True) if cost]
    if costs:
        yield Lines(f"Compared with {document['jobs'][0]}", costs)
    yield table_of("", ("", *document["jobs"]), rows, left=("",), whole=1)
    yield Sentence(NOTE, "note")
    names = document["jobs"]
    for jobs, text in _of_jobs(names, [[sources_text(found)] if found else [] for found in document["figures_from"]]):
        yield Sentence(f"figures: {jobs}{text}")
    for jobs, warning in _warnings(document):
        said = f"{jobs}{warning['rule']}: {warning['message']} → {warning['hint']}"
        yield Sentence(said.removesuffix(" → "), "warning")
    yield from (_gate_sentence(gate, document["jobs"][0]) for gate in document["gates"])


def _gate_sentence(gate: GateEntry, first: str) -> Sentence:
    """`job.toml: memory 103.0 GiB (+3.0%), 100.0 GiB in base.toml; limit: memory>+2%`."""
    text = _formatter(FIGURES_OF_GATES.get(gate["figure"], gate["figure"]))
    change = f" ({gate['change']:+.1%})" if gate["change"] else ""
    value = f"{gate['job']}: {gate['figure']} {text(gate['value'])}{change}, {text(gate['base'])} in {first}"
    style: Style = "failed" if gate["failed"] else "passed"
    return Sentence(f"{value}; {gate['gate']} {style}", style)


def _warnings(document: CompareDocument) -> Iterator[tuple[str, IssueEntry]]:
    """The warnings of `mpctl plan`, once each, after the names of their jobs, if not all."""
    return _of_jobs(document["jobs"], document["warnings"])


def _of_jobs(names: Sequence[str], notes: Iterable[Sequence[Note]]) -> Iterator[tuple[str, Note]]:
    """Each note once, after the names of the jobs that have it, if not all."""
    found: dict[str, tuple[list[str], Note]] = {}
    for name, own in zip(names, notes, strict=True):
        for note in own:
            found.setdefault(str(note), ([], note))[0].append(name)
    for jobs, note in found.values():
        yield "" if len(jobs) == len(names) else f"{' and '.join(jobs)}: ", note


def _setting_rows(document: CompareDocument) -> Iterator[list[str]]:
    training: list[Mapping[str, object]] = [*document["training"]]
    cells = _setting_cells([settings["dtype"] for settings in training])
    autos = [" (auto)" if settings["dtype_is_auto"] else "" for settings in training]
    yield ["dtype", *(cell + auto for cell, auto in zip(cells, autos, strict=True))]
    for key in (key for key in training[0] if key not in UNSHOWN):
        yield [TITLES.get(key, key), *_setting_cells([settings.get(key) for settings in training])]
    shown = {"parallel.zero", *(f"training.{key}" for key in training[0])}
    for name, values in document["settings"].items():
        if name not in shown:
            yield [name, *_setting_cells(values)]


def _setting_cells(values: Sequence[object]) -> list[str]:
    """Each job's value, marked where it differs from the first job's."""
    return [_setting_text(v) if v == values[0] else f"≠ {_setting_text(v)}" for v in values]


def _setting_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else str(value)


def _figure_rows(jobs: Sequence[Mapping[str, float | None]]) -> Iterator[list[str]]:
    names = dict.fromkeys(name for figures in jobs for name in figures)
    for name in (name for name in names if not name.startswith("bytes.") and name not in BAND):  # of whole messages
        values = [figures.get(name) for figures in jobs]
        if any(values):
            yield [_figure_title(name), *_figure_cells(name, values)]
        if name == "step_seconds":
            bands = ([figures.get(end) for end in BAND] for figures in jobs)
            yield [
                "9 of 10 runs",
                *(f"{seconds_text(low)} to {seconds_text(high)}" if low and high else "-" for low, high in bands),
            ]


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


FIGURES = ("step", "9 of 10 runs", "MFU", "memory", "fits")


def runtimes_table(runtimes: Sequence[UnderRuntime]) -> DataTable:
    """A row for each runtime: its step with the band, MFU, memory on device, and the option
    that writes the plan for it; or why it does not run the layout."""
    columns = ("runtime", *FIGURES, "how to run it")
    return table_of(
        f"This layout under other software (MFU: {MFU_CONVENTION})",
        columns,
        [(under.runtime, *_runtime_cells(under), _how(under)) for under in runtimes],
        left=("runtime", "fits", "how to run it"),
        whole=len(columns) - 1,
    )


def _runtime_cells(under: UnderRuntime) -> Iterator[str]:
    if under.plan is None:
        yield from ("-" for _ in FIGURES)
        return
    summary = plan_summary(under.plan)
    low, high = summary.step_seconds_low, summary.step_seconds_high
    yield "-" if summary.step_seconds is None else seconds_text(summary.step_seconds)
    yield "-" if low is None or high is None else f"{seconds_text(low)} to {seconds_text(high)}"
    yield "-" if summary.mfu is None else f"{summary.mfu:.0%}"
    yield bytes_text(summary.device_bytes or 0)
    yield FITS[summary.fits]


def _how(under: UnderRuntime) -> str:
    if under.plan is None:
        return f"does not run {', '.join(under.missing)}"
    if under.profile.runs.launched:
        return "mpctl launch"
    return ", ".join(f"--emit {launcher}" for launcher in under.profile.runs.emit)


Formatter = Callable[[float], str]
LAYER: tuple[tuple[str, str, Formatter], ...] = (
    ("FLOP", "flops", count_text),
    ("parameters", "parameter_bytes", bytes_text),
    ("saved activations", "saved_bytes", bytes_text),
    ("sent", "sent_bytes", bytes_text),
    ("collectives", "collectives", "{:,}".format),
    ("steps of their rings", "hops", "{:,}".format),
    ("time of messages", "tensor_seconds", seconds_text),
)
STEP: tuple[tuple[str, str, Formatter], ...] = (
    ("sent", "sent_bytes", bytes_text),
    ("time of messages", "tensor_seconds", seconds_text),
    ("step", "step_seconds", seconds_text),
    ("on device", "peak_bytes", bytes_text),
)


def print_tensor_modes(document: TensorModesDocument) -> None:
    """Print the costs in symbols, what their columns mean, the job's numbers, and notes."""
    print_parts(tensor_modes_parts(document))


def tensor_modes_parts(document: TensorModesDocument) -> Iterator[Part]:
    yield Sentence(f"{document['job'] or 'this job'} in modes of tensor parallelism", "title")
    yield Sentence(training_line(document["training"]))
    symbols = [(mode, *(costs[name].symbol for name in document["columns"])) for mode, costs in COSTS.items()]
    title = "A linear layer, forward and backward, on P ranks"
    yield table_of(title, ("mode", *document["columns"]), symbols, left=("mode",))
    yield Sentence(f"{'; '.join(f'{name}: {words}' for name, words in document['columns'].items())}.", "note")
    for tp in dict.fromkeys(entry["tp"] for entry in document["modes"]):
        own = [entry for entry in document["modes"] if entry["tp"] == tp]
        if able := [entry for entry in own if entry["layer"]]:
            yield _numbers(document, tp, able)
        for entry in own:
            for issue in entry["issues"]:
                text = f"tp {tp} in {_name(entry)}: {issue['message']}\n  → {issue['hint']}"
                yield Sentence(text, "refused")
    if document["changed"]:
        yield Sentence(f"modes other than 1d are planned without {', '.join(document['changed'])}", "warning")
    yield from (Sentence(f"- {note}", "note") for note in document["notes"])


def _name(entry: TensorModeEntry) -> str:
    return f"{entry['mode']}, depth {entry['depth']}" if entry["depth"] else entry["mode"]


def _numbers(document: TensorModesDocument, tp: int, modes: Sequence[TensorModeEntry]) -> DataTable:
    """The symbols' values and the job's figures, one column per mode; a row ends with its heading."""
    rows: list[list[str]] = [["grid", *(" x ".join(map(str, (entry["axes"] or {}).values())) for entry in modes), ""]]
    for name in document["columns"]:
        values = [entry["costs"][name]["value"] for entry in modes]
        rows.append([name, *("-" if value is None else f"{value:.3g}" for value in values), ""])
    for title, figures, key in (
        ("one layer and micro batch, a rank", LAYER, "layer"),
        ("a step, a rank", STEP, "step"),
    ):
        rows += [[*row, title] for row in _mode_rows(figures, [cast(Any, entry)[key] for entry in modes])]
    rows.append(["fits", *(FITS[e["step"]["fits"]] if e["step"] else "-" for e in modes), "a step, a rank"])
    names = ("", *map(_name, modes))
    columns = [Column(name, at, left=not at) for at, name in enumerate(names)]
    title = f"{document['job'] or 'this job'} on tp {tp}"
    return DataTable(title, columns, rows, group=lambda row: row[-1], whole=1)


def _mode_rows(figures: Sequence[tuple[str, str, Formatter]], entries: Sequence[object]) -> Iterator[list[str]]:
    for title, key, text in figures:
        values = [entry[key] if isinstance(entry, dict) else None for entry in entries]
        yield [title, *("-" if value is None else text(value) for value in values)]
