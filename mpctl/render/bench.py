"""A scaling report as tables: efficiency, rates of a rank, and the formula of its percentages."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from mpctl.bench.report import load_warnings
from mpctl.bench.scaling import ScalingReport, ScalingRow
from mpctl.render.console import get_console, plain_table
from mpctl.units import plural, rate_text, seconds_text

FORMULA = (
    "efficiency = (tokens/s of N ranks / tokens/s of the smallest N0) / (N / N0). The same form "
    "gives Megatron-LM's published 76 %: 15.1 PFLOP/s on 512 GPUs against 39 TFLOP/s on one, "
    "15100 / (512 x 39) (arXiv 1909.08053). at best: what {units} could "
    "reach if nothing but work took time."
)
MODES = {
    "strong": "Strong scaling: the same global batch, shared by more ranks",
    "weak": "Weak scaling: the global batch grows with the ranks",
}
SCALING_COLUMNS = ("ranks", "layout", "batch", "step", "±", "plan's step", "tokens/s",
                   "speed-up", "efficiency", "plan's", "at best")  # fmt: skip
RATE_COLUMNS = ("ranks", "layout", "batch", "FLOP/s a rank", "MFU", "HFU", "processor", "waiting",
                "plan's wait")  # fmt: skip
RATES = (
    "Model FLOP/s of a rank, processor time of rank 0, and what a rank waits in collectives; both "
    "as shares of a step"
)
MARK = "*"


def print_scaling(report: ScalingReport) -> None:
    """Two tables for each mode, how efficiency is computed, and where it was measured, on
    stdout."""
    console, findings = get_console(), report["findings"]
    for mode, title in MODES.items():
        rows = [row for row in report["results"] if row["mode"] == mode]
        if rows:
            _print_table(title, SCALING_COLUMNS, [_scaling_cells(row) for row in rows])
    timed = {row["layout"] + str(row["global_batch_size"]): row for row in report["results"]}
    if timed:
        _print_table(RATES, RATE_COLUMNS, [_rate_cells(row) for row in timed.values()])
    units = _units(report)
    console.print(Text(FORMULA.format(units=units), style="dim"))
    where, rounds = report["environment"], max((r["rounds"] for r in timed.values()), default=0)
    note = (f"medians of {plural(rounds, 'round')} of {plural(findings['steps_timed'], 'step')}; "
            f"{plural(where['cores'], 'core')}, {plural(where['gpus'], 'GPU')}")  # fmt: skip
    console.print(Text(f"{note}, torch {where['torch']}, {where['date']}", style="dim"))
    for warning in [*_rehearsals(report, units), *load_warnings(where), *_unfinished(report)]:
        console.print(Text.assemble(("! ", "bold yellow"), warning))


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = plain_table(title, columns, left=("layout",))
    for cells in rows:
        table.add_row(*cells)
    get_console().print(table, "")


def _head(row: ScalingRow) -> tuple[str, str, str]:
    layout = row["layout"] + MARK * row["is_rehearsal"]
    return str(row["world_size"]), layout, str(row["global_batch_size"])


def _scaling_cells(row: ScalingRow) -> tuple[str, ...]:
    half = (row["seconds_max"] - row["seconds_min"]) / 2 / row["seconds"]
    return (
        *_head(row), seconds_text(row["seconds"]), f"{half:.0%}" if row["rounds"] > 1 else "",
        _seconds(row["predicted_seconds"]), f"{row['tokens_per_second']:,.0f}",
        f"{row['speed_up']:.2f}", f"{row['efficiency']:.0%}", _share(row["predicted_efficiency"]),
        f"{row['perfect_efficiency']:.0%}",
    )  # fmt: skip


def _rate_cells(row: ScalingRow) -> tuple[str, ...]:
    return (
        *_head(row), rate_text(row["flops_per_second"]), _share(row["mfu"]), _share(row["hfu"]),
        f"{row['cpu_seconds'] / row['seconds']:.0%}", _share(row["communication_share"]),
        _share(row["predicted_communication_share"]),
    )  # fmt: skip


def _seconds(value: float | None) -> str:
    return "–" if value is None else seconds_text(value)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _units(report: ScalingReport) -> str:
    """What the ranks ran on: `2 cores`, `8 GPUs`."""
    return plural(report["findings"]["units"], report["findings"]["unit"])


def _rehearsals(report: ScalingReport, units: str) -> list[str]:
    if not any(row["is_rehearsal"] for row in report["results"]):
        return []
    most = max(row["world_size"] for row in report["results"])
    return [
        f"{MARK} rehearsal, not a measurement: up to {plural(most, 'rank')} share {units}, so that "
        "their efficiency says nothing of ranks that have one each"
    ]


def _unfinished(report: ScalingReport) -> list[str]:
    return [] if report["is_complete"] else ["not every case ran in every round"]
