"""How well few own runs tell the rest of their sweep: `python -m benchmarks.own_runs`.

Each sweep of published runs is taken as that of a system that nobody knows (tests/own_sweeps.py).
Then 5, 20 and 40 of its runs are drawn at random and fitted (`mpctl.measure.calibrate.own`), and the others
are estimated: mean absolute error of the step in percent, before the fit and after it; the share of
them inside the band that the fit states; regret, by how much the layout with the best estimate is
slower than the best one of its sweep of three and more, median and mean; processor seconds of the
fit. Means over draws (`--draws 6`). With names of sweeps (`vtrain nanotron`) only those.

Some minutes: a fit to all runs, one without each table, and 18 own fits a sweep.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from statistics import fmean, median

from mpctl.measure.calibrate.runs import Run
from tests.own_sweeps import SIZES, SWEEPS, draw, error_before, held_out_values, read_sweep

DRAWS = 6


def print_sweep(name: str, runs: Sequence[Run], draws: int) -> None:
    """One row: before, and for each size error, share inside, regrets and seconds."""
    cells = [name, str(len(runs)), f"{100 * error_before(runs):.1f}"]
    for size in SIZES:
        if size > 0.7 * len(runs):
            cells += [""] * 4
            continue
        scores = [draw(runs, size, seed) for seed in range(draws)]
        regrets = list(chain.from_iterable(score.regrets for score in scores))
        cells += [
            f"{100 * fmean(score.error for score in scores):.1f}",
            f"{100 * fmean(score.inside for score in scores):.0f}",
            f"{100 * median(regrets):.1f}, {100 * fmean(regrets):.1f}" if regrets else "",
            f"{fmean(score.seconds for score in scores):.1f}",
        ]
    print("| " + " | ".join(cells) + " |", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Print the table, a row a sweep."""
    draws = int(arguments[arguments.index("--draws") + 1]) if "--draws" in arguments else DRAWS
    wanted = [name for name in SWEEPS if any(word in name for word in arguments if not word.isdigit())]
    print("| sweep | n | before |" + "".join(f" {n}: error | inside | regret | s |" for n in SIZES))
    for name, values in held_out_values(wanted or list(SWEEPS)):
        print_sweep(name, read_sweep(SWEEPS[name], values), draws)


if __name__ == "__main__":
    main(sys.argv[1:])
