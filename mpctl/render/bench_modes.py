"""A report of `mpctl bench tensor-modes` as tables: measured, beside its plan, against the law."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from mpctl.bench.report import load_warnings
from mpctl.bench.tensor_modes import ModeCases, ModeRow, TensorModesReport
from mpctl.render.console import get_console, plain_table
from mpctl.units import bytes_text, plural, seconds_text

LAW = "law: a rank's bytes times the ranks, over those of the unsharded layer; 1 is a P-th"
REHEARSAL = (
    "a rehearsal: {ranks} share {cores}, so that wall time says nothing of ranks that have a core "
    "each; processor time, bytes and memory do"
)


def print_cases(cases: ModeCases, *, rounds: int, steps: int) -> None:
    """What `--dry-run` says: the modes that would be timed, and those that would not."""
    console = get_console()
    model = cases.job.model
    assert model is not None, "a bench is of a model"
    console.print(
        f"would time one layer of {model.name or model.family} on {plural(cases.ranks, 'rank')}: "
        f"{plural(rounds, 'round')} of {plural(steps, 'step')} in each of"
    )
    for case in cases.cases:
        console.print(f"  {case.mode:<5} {' x '.join(map(str, case.axes.values()))}")
    for mode, issue in cases.refused:
        console.print(_refused(mode, issue.message, issue.hint))


def print_report(report: TensorModesReport) -> None:
    """The table of each kind of figure, what could not be timed, and where it was measured."""
    console, rows = get_console(), report["results"]
    layer = ", ".join(f"{name} {size}" for name, size in report["findings"]["layer"].items())
    title = f"One layer ({layer}), {plural(report['findings']['micro_batch_size'], 'sample')}"
    table = plain_table(title, ("", *(row["name"] for row in rows)), left=("",))
    table.columns[0].no_wrap = True
    for words, text in _TIMES.items():
        table.add_row(words, *map(text, rows))
    for words, measured, planned in _SIZES:
        table.add_row(words, *(bytes_text(row[measured]) for row in rows))  # type: ignore[literal-required]
        cells = (_difference(row[measured], row[planned]) for row in rows)  # type: ignore[literal-required]
        table.add_row("  planned", *cells)
    for words, text in _LAWS.items():
        table.add_row(words, *map(text, rows))
    if rows:
        console.print(table)
    console.print(Text(LAW, style="dim"))
    for refused in report["findings"]["refused"]:
        issue = refused["issue"]
        console.print(_refused(refused["mode"], issue["message"], issue["hint"]))
    _print_where(report)


def _print_where(report: TensorModesReport) -> None:
    console, where = get_console(), report["environment"]
    rounds = max((row["rounds"] for row in report["results"]), default=0)
    note = f"medians of {plural(rounds, 'round')} of {plural(report['findings']['steps'], 'step')}"
    machine = f"{plural(where['cores'], 'core')}, {plural(where['gpus'], 'GPU')}"
    console.print(Text(f"{note}; {machine}, torch {where['torch']}, {where['date']}", style="dim"))
    warnings = load_warnings(where)
    if report["findings"]["is_rehearsal"]:
        ranks, cores = plural(report["findings"]["ranks"], "rank"), plural(where["cores"], "core")
        warnings.insert(0, REHEARSAL.format(ranks=ranks, cores=cores))
    if not report["is_complete"]:
        warnings.insert(0, "stopped early: of some modes fewer rounds, or none, were timed")
    for warning in warnings:
        console.print(Text.assemble(("! ", "bold yellow"), warning))


def _refused(mode: str, message: str, hint: str) -> Text:
    return Text.assemble(("✗ ", "bold red"), (mode, "bold"), f": {message}", f"\n  → {hint}")


def _difference(measured: float, planned: float) -> str:
    return (
        "the same"
        if measured == planned
        else f"{bytes_text(planned)} ({measured / planned - 1:+.1%})"
    )


_TIMES: dict[str, Callable[[ModeRow], str]] = {
    "grid": lambda row: " x ".join(map(str, row["axes"].values())),
    "time of a step": lambda row: seconds_text(row["seconds"]),
    "  least to most": lambda row: (
        f"{seconds_text(row['seconds_min'])} to {seconds_text(row['seconds_max'])}"
    ),
    "processor time of a rank": lambda row: seconds_text(row["cpu_seconds"]),
    "collectives": lambda row: (
        f"{row['collectives']}" if row["collectives"] == row["planned_collectives"]
        else f"{row['collectives']} (planned {row['planned_collectives']})"
    ),
}  # fmt: skip
_SIZES = (
    ("sent by a rank", "sent_bytes", "planned_sent_bytes"),
    ("parameters of a rank", "parameter_bytes", "planned_parameter_bytes"),
    ("saved activations of a rank", "saved_bytes", "planned_saved_bytes"),
)
_LAWS: dict[str, Callable[[ModeRow], str]] = {
    "law, parameters": lambda row: f"{row['parameters_law']:.3f}",
    "law, activations": lambda row: f"{row['activations_law']:.3f}",
}
