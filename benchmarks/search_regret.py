"""What a user pays who runs the first row of a search: `python -m benchmarks.search_regret`.

Over published sweeps, by constants that had not seen the run (fifths of a table, whole tables, all of a
cluster): regret of the first row and of the suggested one among layouts that fit by plan, in percent, mean
and median. Then the same sweeps under the profile `other`, as runs of a trainer that nobody knows. Then the
verdict on memory over nanotron's sweep: ran and fits, failed and does not, balanced accuracy.
"""

from __future__ import annotations

from mpctl.spec.cluster import ClusterSpec
from tests.search_sweeps import as_unknown, kept_back, unknown_trainer, verdict_cells
from tests.verdicts import judged_runs

GRADIENTS = (None, "fp32")


def line(*cells: str) -> None:
    """Print a row of a table."""
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the three tables."""
    line("sweeps of", "left out", "n", "first: mean", "median", "suggested: mean", "median")
    line(*["---"] * 7)
    for name, kind, regrets in kept_back():
        line(name, kind, *regrets.cells())
    for dtype in GRADIENTS:
        for table, regrets in unknown_trainer(gradient_dtype=dtype):
            line(f"{table} as `other`", f"gradients {dtype or 'not named'}", *regrets.cells())
    print()
    line("memory of nanotron's runs", "n", "ran, fits", "failed, does not", "balanced")
    line(*["---"] * 5)
    runs, headroom = judged_runs(), ClusterSpec().headroom
    line("by its profile", *verdict_cells(runs, headroom))
    for dtype in GRADIENTS:
        line(
            f"as `other`, gradients {dtype or 'not named'}",
            *verdict_cells(list(as_unknown(runs, gradient_dtype=dtype)), headroom),
        )


if __name__ == "__main__":
    main()
