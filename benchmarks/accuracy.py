"""How far the planner's estimates are from published runs: `python -m benchmarks.accuracy`.

Of every table of tests/recorded/published_runs.json: mean and median absolute error of step
seconds, bias, the gate beside it; with --cross also over runs that the constants were not fitted to
(each fifth run of a table left out; whole tables left out; some minutes). Of every sweep (runs of
one model, cluster and number of GPUs in one table): Spearman's rank correlation of measured and
estimated tokens a second, and the regret, by how much the run that the planner would have chosen is
slower than the best one measured. Memory errors where a run publishes its peak.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import exp, expm1, log
from pathlib import Path
from statistics import mean, median

from mpctl.calibrate.cross import Residuals, folds, residuals, tables
from mpctl.calibrate.runs import Run, read_runs
from mpctl.estimate.job import Estimate
from mpctl.estimate.time import find_step_time

GOLDEN = Path(__file__).parents[1] / "tests" / "recorded"
# Of the mean absolute error, in percent; whole devices and tables are held to it together.
GATES = {
    "Selene": 5.0, "B200": 5.0, "Jean Zay": 6.0, "vTrain, several nodes": 8.0, "zero bubble": 8.0,
    "MosaicML": 10.0, "torchtitan": 10.0, "vTrain, one node": 12.0,
}  # fmt: skip
TABLES = {
    "narayanan21_t1": "Selene", "korth22_t5": "Selene", "korth22_t4_layer": "Selene",
    "megatron2020": "Selene", "simumax_b200": "B200", "bloom": "Jean Zay",
    "vtrain_multi": "vTrain, several nodes", "zb": "zero bubble", "mosaic": "MosaicML",
    "torchtitan": "torchtitan", "vtrain_single": "vTrain, one node",
}  # fmt: skip
LEAST_SWEEP = 3
GIB = {"gb": 1e9, "gib": 2**30}


@cache
def published_runs() -> tuple[Run, ...]:
    rows = json.loads((GOLDEN / "published_runs.json").read_text("utf-8"))["rows"]
    return tuple(read_runs(rows))


def by_table(found: Residuals) -> dict[str, list[float]]:
    """Errors as parts of the measured, by gate."""
    errors: dict[str, list[float]] = defaultdict(list)
    for run in published_runs():
        errors[TABLES[run.group]] += [expm1(r) for r in found[run.id]]
    return errors


def sweeps() -> Iterator[tuple[str, list[Run]]]:
    """Runs of one model and global batch in one place: they differ in their layout alone."""
    found: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in published_runs():
        if "step_seconds" in run.measured:
            m = run.job.model
            assert m is not None
            shape = (m.layers, m.hidden, m.seq_length, m.vocab)
            batch = run.job.training.global_batch_size
            found[(run.group, shape, run.job.world_size, batch)].append(run)
    for (group, (layers, hidden, *_), world, _), runs in found.items():
        if len(runs) >= LEAST_SWEEP:
            yield f"{group}, {layers} x {hidden} on {world}", runs


def speeds(runs: Sequence[Run], found: Residuals) -> list[tuple[float, float]]:
    """Tokens a second, measured and estimated."""
    batches = [run.job.training.global_batch_size or 1 for run in runs]
    measured = [b / r.measured["step_seconds"] for b, r in zip(batches, runs, strict=True)]
    return [(m, m / exp(found[r.id][0])) for m, r in zip(measured, runs, strict=True)]


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    ranks = [_ranks(values) for values in zip(*pairs, strict=True)]
    n = len(pairs)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (n * (n * n - 1))


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(order)
    for rank, at in enumerate(order):
        ranks[at] = rank
    return ranks


# nvidia-smi counts context and libraries too.
MEASURES = {
    "peak_mem_gb": "allocated_bytes", "peak_mem_gib_allocated": "allocated_bytes",
    "peak_mem_gib_reserved": "reserved_bytes", "peak_mem_gb_nvidia_smi": "device_bytes",
}  # fmt: skip


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    chosen = max(pairs, key=lambda pair: pair[1])[0]
    return max(measured for measured, _ in pairs) / chosen - 1


def memory_errors() -> Iterator[tuple[str, str, float]]:
    """Table, what was measured, and the estimate's error."""
    for run in published_runs():
        for key, value in run.measured.items():
            if not key.startswith("peak_mem"):
                continue
            estimate = Estimate(run.layout)
            peak = max(getattr(stage, MEASURES[key]) for stage in estimate.memory)
            unit = GIB["gib" if "gib" in key else "gb"]
            yield TABLES[run.group], key, peak / (value * unit) - 1


def milliseconds() -> float:
    """Of one estimate, the first of its job."""
    started = time.perf_counter()
    for run in published_runs():
        find_step_time(run.layout)
    return 1e3 * (time.perf_counter() - started) / len(published_runs())


def main(arguments: Sequence[str]) -> None:
    speed = milliseconds()
    runs = published_runs()
    own = residuals(runs, {})
    columns: dict[str, Mapping[str, list[float]]] = {"fit": by_table(own)}
    if "--cross" in arguments:
        priors = json.loads((GOLDEN / "priors.json").read_text("utf-8"))
        near, apart = folds(runs, priors), tables(runs, priors)
        columns |= {"fifths": by_table(near), "tables": by_table(apart)}
    print(f"{len(runs)} runs, {speed:.2f} ms an estimate; mean absolute error of a step, percent\n")
    print(f"{'table':24}{'n':>5}{'gate':>7}" + "".join(f"{name:>8}" for name in columns)
          + f"{'median':>8}{'bias':>7}")  # fmt: skip
    for table, gate in GATES.items():
        first = columns["fit"][table]
        shown = "".join(f"{100 * mean(map(abs, c[table])):8.1f}" for c in columns.values())
        rest = f"{100 * median(map(abs, first)):8.1f}{100 * mean(first):+7.1f}"
        print(f"{table:24}{len(first):5}{gate:7.0f}{shown}{rest}")
    inside = [abs(log(run.estimate().high / run.estimate().total)) >= abs(own[run.id][0])
              for run in runs if "step_seconds" in run.measured]  # fmt: skip
    print(f"\n{100 * mean(inside):.0f} % of the steps lie between their estimate's low and high")
    print(f"\n{'sweep':40}{'n':>4}{'spearman':>10}{'regret':>9}")
    for name, found in sweeps():
        pairs = speeds(found, own)
        print(f"{name:40}{len(found):4}{spearman(pairs):10.2f}{100 * regret(pairs):8.1f} %")
    peaks: dict[tuple[str, str], list[float]] = defaultdict(list)
    for table, key, error in memory_errors():
        peaks[table, key].append(error)
    print(f"\n{'peak memory':40}{'n':>4}{'error':>10}{'bias':>9}")
    for (table, key), errors in peaks.items():
        error, bias = 100 * mean(map(abs, errors)), 100 * mean(errors)
        print(f"{table + ', ' + key:40}{len(errors):4}{error:8.1f} %{bias:+7.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
