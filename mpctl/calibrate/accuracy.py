"""How good estimates are against measured runs: rank correlation and regret of layout sweeps.

A sweep is a set of runs with the same model, global batch, data type, cluster and number of GPUs.
They differ only in their layout, so that the estimate should put them in the measured order.
Residuals are log(estimated / measured) by run id (`mpctl.calibrate.cross`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import exp, log
from statistics import correlation, fmean

from mpctl.calibrate.fit import Residuals
from mpctl.calibrate.runs import Run, constants_of, get_prior, get_value

LEAST_SWEEP = 3  # runs; two are ranked right by chance half the time


def find_sweeps(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The sweeps among the runs whose step was measured, by a short description of each; of runs of
    one layout, which other versions of a software or other days set apart, the first."""
    by_settings: dict[tuple[object, ...], dict[str, Run]] = defaultdict(dict)
    for run in runs:
        if "step_seconds" in run.measured and (model := run.job.model) is not None:
            training, cluster = run.job.training, run.parts["clusters"]
            model_key = model.model_copy(update={"name": None}).model_dump_json()
            same = (run.group, cluster, model_key, run.job.world_size)
            layout = f"{run.job.parallel} {training.micro_batch_size} {training.recompute}"
            layouts = by_settings[(*same, training.global_batch_size, training.dtype)]
            layouts.setdefault(layout, run)
    sweeps: dict[str, list[Run]] = {}
    for sweep in (list(layouts.values()) for layouts in by_settings.values()):
        if len(sweep) >= LEAST_SWEEP:
            title = _title(sweep[0])
            same_title = sum(known.startswith(title) for known in sweeps)
            sweeps[f"{title} ({same_title + 1})" if same_title else title] = sweep
    return sweeps


def _title(run: Run) -> str:
    model, batch = run.job.model, run.job.training.global_batch_size
    shape = f"{model.layers} x {model.hidden}, {model.seq_length}" if model else ""
    return f"{run.group}, {shape} on {run.job.world_size}, batch {batch}"


def samples_per_second(runs: Sequence[Run], residuals: Residuals) -> list[tuple[float, float]]:
    """Measured and estimated samples per second of each run.

    residuals: log(estimated / measured) by run id.
    """
    batches = [run.job.training.global_batch_size or 1 for run in runs]
    measured = [b / r.measured["step_seconds"] for b, r in zip(batches, runs, strict=True)]
    return [(m, m / exp(residuals[r.id][0])) for m, r in zip(measured, runs, strict=True)]


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation of the pairs, in -1..1: Pearson's of their ranks, where equal
    values have the mean of the ranks that they take. Raises statistics.StatisticsError for fewer
    than two pairs, and where all values of one side are equal.

    >>> spearman([(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)])  # 1 - 6 x 2 / (3 x 8)
    0.5
    """
    return correlation(_ranks([a for a, _ in pairs]), _ranks([b for _, b in pairs]))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; of equal values each has the mean of theirs."""
    in_order = sorted(values)
    return [(bisect_left(in_order, v) + bisect_right(in_order, v) + 1) / 2 for v in values]


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """How much faster the best run is than the one with the best estimate, as a share.

    pairs: measured and estimated samples per second.

    >>> regret([(10.0, 8.0), (11.0, 7.0)])  # the estimate chooses the first, which is 10 % slower
    0.10000000000000009
    """
    chosen = max(pairs, key=lambda pair: pair[1])[0]
    return max(measured for measured, _ in pairs) / chosen - 1


def order_of_pairs(
    pairs: Sequence[tuple[float, float]], near: float
) -> tuple[list[bool], list[bool]]:
    """Whether each two runs of a sweep ran in the estimated order: of those whose estimates differ
    by less than `near`, a share, and of the others.

    pairs: measured and estimated samples per second.

    >>> order_of_pairs([(10.0, 10.0), (11.0, 9.9), (20.0, 30.0)], 0.04)
    ([False], [True, True])
    """
    close: list[bool] = []
    far: list[bool] = []
    for (one, seen), (other, there) in combinations(pairs, 2):
        is_near = abs(log(seen / there)) < near
        (close if is_near else far).append((one - other) * (seen - there) > 0)
    return close, far


def optimism(pairs: Sequence[tuple[float, float]]) -> float:
    """By how much the run with the best estimate is estimated too fast, beside the mean of its
    sweep: a difference of logarithms, about the share.

    pairs: measured and estimated samples per second.

    >>> round(optimism([(10.0, 10.0), (10.0, 11.0)]), 4)
    0.0477
    """
    errors = [log(estimated / measured) for measured, estimated in pairs]
    chosen = max(range(len(pairs)), key=lambda number: pairs[number][1])
    return errors[chosen] - fmean(errors)


def constant_values(runs: Sequence[Run], priors: Mapping[str, float]) -> dict[str, list[float]]:
    """[value in its preset, prior] of each constant that a fit to these runs may change, by key."""
    values = {}
    for constant in constants_of(runs):
        run = next(run for run in runs if run.has(constant))
        preset = run.model(constant.kind)
        values[constant.key] = [
            get_value(preset, constant.path),
            get_prior(preset, constant, priors),
        ]
    return values
