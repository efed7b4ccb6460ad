"""How well memory and the verdict "it fits" are estimated: `python -m benchmarks.memory_accuracy`.

Three tables of nanotron's sweep (peaks of other software: benchmarks/accuracy.py). Peaks: error of
the estimate, by model and number of stages. Verdicts: runs that ran or failed, and whether the plan
says that they fit under the default headroom, with balanced accuracy; only failed runs whose cause
may have been memory count (tests/verdicts.py). Left out: for each model the headroom that is best
for the others, and its accuracy on this one. Then the published runs of other software that are
refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import mean
from typing import Any

from mpctl.core.errors import InputError
from mpctl.plan.batch.rows import as_others_run, load_row
from mpctl.plan.planning.plan import make_plan
from mpctl.spec.cluster import ClusterSpec
from tests.published import earlier_rows, modern_rows
from tests.verdicts import JudgedRun, balanced_accuracy, best_headroom, judged_runs

HEADROOM = ClusterSpec().headroom


def peak_lines(runs: Iterable[JudgedRun]) -> Iterator[str]:
    """Mean absolute error and mean error of reserved bytes, by model and number of stages."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.peak_bytes is not None:
            error = run.first_bytes / run.peak_bytes - 1
            for name in ("all", run.model, f"pp {run.job.parallel.pp:2}"):
                groups[name].append(error)
    yield "| nanotron, reserved on the first stage | runs | mean absolute error | mean error |"
    yield "|---|---|---|---|"
    for name, errors in sorted(groups.items()):
        yield f"| {name} | {len(errors)} | {mean(map(abs, errors)):.1%} | {mean(errors):+.1%} |"


def verdict_lines(runs: Sequence[JudgedRun]) -> Iterator[str]:
    """The four counts and balanced accuracy, by model and for all."""
    columns = "ran, fits | ran, refused | failed, refused | failed, fits | balanced accuracy"
    yield f"| headroom {HEADROOM:g} % | {columns} |"
    yield "|---|---|---|---|---|---|"
    models = dict.fromkeys(run.model for run in runs)
    for name in ("all", *models):
        yield _counts(name, [run for run in runs if name in ("all", run.model)])
    every = balanced_accuracy(runs, HEADROOM, lambda run: True)
    yield f"\nWith every failed run, crashes among them: {every:.3f}."


def _counts(name: str, runs: Sequence[JudgedRun]) -> str:
    cells = [
        sum(run.fits(HEADROOM) is fits for run in runs if run.ran is ran and run.has_cause)
        for ran, fits in ((True, True), (True, False), (False, False), (False, True))
    ]
    whole = balanced_accuracy(runs, HEADROOM)
    return f"| {name} | {' | '.join(map(str, cells))} | {whole:.3f} |"


def left_out_lines(runs: Sequence[JudgedRun]) -> Iterator[str]:
    """For each model the headroom that the others choose, and balanced accuracy on this one."""
    yield "| left out | headroom of the others, % | balanced accuracy |"
    yield "|---|---|---|"
    for model in dict.fromkeys(run.model for run in runs):
        others = [run for run in runs if run.model != model]
        own, share = [run for run in runs if run.model == model], best_headroom(others)
        yield f"| {model} | {share:g} | {balanced_accuracy(own, share):.3f} |"


def refused_lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Published runs that do not fit by the plan, or fit by less than the headroom."""
    known = refused = 0
    for row in rows:
        try:
            loaded = load_row(row["job"])
            if loaded.job is None or loaded.issues:
                continue
            plan = make_plan(as_others_run(loaded.job)[0])
        except InputError:
            continue
        known += plan.fits is not None
        if plan.fits is False:
            refused += 1
            yield f"  {row['id']}"
    yield f"{refused} of {known} published runs of other software are refused"


def main() -> None:
    """Print all tables."""
    runs = judged_runs()
    for lines in (peak_lines(runs), verdict_lines(runs), left_out_lines(runs)):
        print("\n".join(lines), end="\n\n")
    print("\n".join(refused_lines([*earlier_rows(), *modern_rows()])))


if __name__ == "__main__":
    main()
