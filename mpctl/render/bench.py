"""A scaling report as a table, with the formula that its percentages follow."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from mpctl.bench.report import load_warnings
from mpctl.bench.scaling import ScalingReport, ScalingRow
from mpctl.render.console import get_console, plain_table
from mpctl.units import plural, seconds_text

FORMULA = (
    "efficiency = (tokens/s of N ranks / tokens/s of the smallest N0) / (N / N0). The same form "
    "gives Megatron-LM's published 76 %: 15.1 PFLOP/s on 512 GPUs against 39 TFLOP/s on one, "
    "15100 / (512 x 39) (arXiv 1909.08053)."
)
MODES = {
    "strong": "Strong scaling: the same global batch, shared by more ranks",
    "weak": "Weak scaling: the global batch grows with the ranks",
}


def print_scaling(report: ScalingReport) -> None:
    """A table for each mode, how efficiency is computed, and where it was measured, on stdout."""
    console = get_console()
    for mode, title in MODES.items():
        rows = [row for row in report["results"] if row["mode"] == mode]
        if rows:
            console.print(_table(title, rows), "")
    console.print(Text(FORMULA, style="dim"))
    where = report["environment"]
    note = (f"medians of {plural(report['findings']['steps_timed'], 'step')}; "
            f"{plural(where['cores'], 'core')}, {plural(where['gpus'], 'GPU')}")  # fmt: skip
    console.print(Text(f"{note}, torch {where['torch']}, {where['date']}", style="dim"))
    for warning in load_warnings(where):
        console.print(Text.assemble(("! ", "bold yellow"), warning))


def _table(title: str, rows: list[ScalingRow]) -> Table:
    columns = ("ranks", "layout", "batch", "step", "cpu a rank", "tokens/s", "speed-up",
               "efficiency")  # fmt: skip
    table = plain_table(title, columns, left=("layout",))
    for row in rows:
        layout = " x ".join(f"{axis} {size}" for axis, size in row["sizes"].items())
        table.add_row(
            str(row["world_size"]), layout, str(row["global_batch_size"]),
            seconds_text(row["seconds"]), seconds_text(row["cpu_seconds"]),
            f"{row['tokens_per_second']:,.0f}", f"{row['speed_up']:.2f}",
            f"{row['efficiency']:.0%}",
        )  # fmt: skip
    return table
