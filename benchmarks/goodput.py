"""The law of goodput against a simulation of the same run and against published runs, as the tables
of benchmarks/results/goodput.md and docs/goodput.md: `python -m benchmarks.goodput`.
"""

from __future__ import annotations

from dataclasses import replace

from mpctl.plan.estimate.goodput import (
    Failures,
    SaveCost,
    best_interval,
    daly_interval,
    first_order,
    spare_nodes,
    time_shares,
    young_interval,
)
from tests.goodput import HOUR, PUBLISHED, REPAIR, SIZES, case, simulate


def by_size(count: int) -> None:
    """Print the law and the simulation for runs of 8 to 131,072 GPUs."""
    print(
        "| GPUs | between failures | save pauses, whole after | best interval | useful: law "
        "| simulated | saves | done again | down | spares |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for gpus in SIZES:
        failures, save = case(gpus)
        interval = best_interval(save, failures.mtbf)
        law = time_shares(failures, save, interval)
        seen = simulate(failures, save, interval, count=count)
        spares = spare_nodes(REPAIR / failures.mtbf)
        print(
            f"| {gpus:,} | {failures.mtbf / HOUR:,.1f} h | {save.pause:.1f} s, {save.write:.0f} s "
            f"| {interval / 60:.1f} min | {law.useful:.2%} | {seen.useful:.2%} | {law.saves:.2%} "
            f"| {law.lost:.2%} | {law.down:.2%} | {spares} |"
        )


def by_interval(count: int) -> None:
    """Print where sums of first order and the short forms of the best interval stop holding."""
    failures, save = Failures(3600.0, 23.0, 300.0), SaveCost(10.0)
    print("\n| interval / M | useful: law | simulated | first order |\n|--:|--:|--:|--:|")
    for share in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        interval = share * failures.mtbf
        law = time_shares(failures, save, interval).useful
        seen = simulate(failures, save, interval, count=count).useful
        rough = first_order(failures, save, interval)
        print(f"| {share} | {law:.2%} | {seen:.2%} | {rough:.2%} |")
    print("\n| pause / M | best interval / M | Young | Daly |\n|--:|--:|--:|--:|")
    for share in (0.0001, 0.001, 0.01, 0.1, 0.5, 1.0):
        pause = replace(save, pause=share)
        best = best_interval(pause, 1.0)
        print(f"| {share} | {best:.4f} | {young_interval(share, 1.0):.4f} | {daly_interval(share, 1.0):.4f} |")


def by_publication() -> None:
    """Print the law beside what was published."""
    print("\n| run | from | published | law |\n|---|---|--:|--:|")
    for row in PUBLISHED:
        print(f"| {row.run} | {row.source} | {row.published} | {row.useful:.1%} |")


def main() -> None:
    """Print the tables; each simulated run fails 3,000 times."""
    by_size(3_000)
    by_interval(3_000)
    by_publication()


if __name__ == "__main__":
    main()
