"""How far the planner's estimates are from published runs: `python -m benchmarks.accuracy`.

For every table of tests/recorded/published_runs.json: mean absolute error of step seconds under the
presets' constants (`fit`), by constants that were fitted without each fifth of a table (`fifths`),
with the gate that these are held to, and without each whole table (`tables`). For every sweep (runs
of one model, batch, dtype, cluster and number of GPUs): Spearman's rank correlation of measured and
estimated speed, and the regret, by how much the run that the planner would have chosen is slower
than the best one. Memory errors where a run publishes its peak.

`--cross` computes both again and writes tests/recorded/cross_validated.json, which
tests/calibrate/test_accuracy.py checks (some minutes).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from math import log
from statistics import mean, median

from mpctl.calibrate.accuracy import (
    constant_values,
    find_sweeps,
    regret,
    samples_per_second,
    spearman,
)
from mpctl.calibrate.cross import Residuals, folds, residuals, tables
from mpctl.calibrate.evaluate import open_evaluator
from mpctl.calibrate.fit import Fit
from mpctl.calibrate.record import CrossRecord, hash_json, read_record, what_changed
from mpctl.calibrate.runs import constants_of
from mpctl.estimate.job import Estimate
from mpctl.estimate.time import find_step_time
from tests.published import (
    CROSS_VALIDATED,
    GATE_OF,
    GATES,
    errors_by_gate,
    mean_percent,
    published_rows,
    published_runs,
    read_priors,
)

ROUNDS = 12  # of the fit to all runs
GIB = {"gb": 1e9, "gib": 2**30}
# Which figure of the estimate a published peak is compared with: nvidia-smi counts context and
# libraries too.
MEASURES = {
    "peak_mem_gb": "allocated_bytes", "peak_mem_gib_allocated": "allocated_bytes",
    "peak_mem_gib_reserved": "reserved_bytes", "peak_mem_gb_nvidia_smi": "device_bytes",
}  # fmt: skip


def cross_validate() -> CrossRecord:
    """Fit to all runs, then without each fifth and without each table: minutes."""
    runs, priors = published_runs(), read_priors()
    line = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    constants = constants_of(runs)
    with open_evaluator(runs, constants) as evaluate:
        fit = Fit(runs, constants, evaluate, priors)
        whole = fit.solve(rounds=ROUNDS, say=_say)
        fifths, apart = folds(fit, whole, say=_say), tables(fit, whole, say=_say)
    return CrossRecord(
        date=date.today().isoformat(),
        commit=commit,
        rows_sha256=hash_json(published_rows()),
        constants_sha256=hash_json(constant_values(runs, priors)),
        fitted=residuals(runs, {}),
        fifths=fifths,
        tables=apart,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def memory_errors() -> Iterator[tuple[str, str, float]]:
    """For every published peak: gate, what was measured, and the estimate's relative error."""
    for run in published_runs():
        for key, value in run.measured.items():
            if not key.startswith("peak_mem"):
                continue
            estimate = Estimate(run.layout)
            peak = max(getattr(stage, MEASURES[key]) for stage in estimate.memory)
            unit = GIB["gib" if "gib" in key else "gb"]
            yield GATE_OF[run.group], key, peak / (value * unit) - 1


def milliseconds() -> float:
    """The mean time of one estimate, the first of its job."""
    started = time.perf_counter()
    for run in published_runs():
        find_step_time(run.layout)
    return 1e3 * (time.perf_counter() - started) / len(published_runs())


def print_steps(columns: Mapping[str, Residuals]) -> None:
    """One row a gate: the mean absolute error under each column's constants."""
    errors = {name: errors_by_gate(column) for name, column in columns.items()}
    print(f"{'table':24}{'n':>5}{'gate':>7}" + "".join(f"{name:>8}" for name in columns)
          + f"{'median':>8}{'bias':>7}")  # fmt: skip
    for table, gate in GATES.items():
        fit = errors["fit"][table]
        shown = "".join(f"{mean_percent(column[table]):8.1f}" for column in errors.values())
        rest = f"{100 * median(map(abs, fit)):8.1f}{100 * mean(fit):+7.1f}"
        print(f"{table:24}{len(fit):5}{gate:7.0f}{shown}{rest}")


def print_sweeps(columns: Mapping[str, Residuals]) -> None:
    """One row a sweep: rank correlation and regret under each column's constants."""
    sweeps = find_sweeps(published_runs())
    for name, column in columns.items():
        print(f"\n{'sweep, ' + name:48}{'n':>4}{'spearman':>10}{'regret':>9}")
        ranked = {title: samples_per_second(runs, column) for title, runs in sweeps.items()}
        for title, pairs in ranked.items():
            print(f"{title:48}{len(pairs):4}{spearman(pairs):10.2f}{100 * regret(pairs):8.1f} %")
        print(f"{'mean':48}{len(ranked):4}{mean(map(spearman, ranked.values())):10.2f}"
              f"{100 * mean(map(regret, ranked.values())):8.1f} %")  # fmt: skip


def print_band(own: Residuals) -> None:
    """How many of the measured steps lie between their estimate's low and high."""
    inside = []
    for run in published_runs():
        if "step_seconds" in run.measured:
            estimate = run.estimate()
            inside.append(abs(log(estimate.high / estimate.total)) >= abs(own[run.id][0]))
    print(f"\n{100 * mean(inside):.0f} % of the steps lie between their estimate's low and high")


def print_memory() -> None:
    """One row a kind of published peak."""
    peaks: dict[tuple[str, str], list[float]] = defaultdict(list)
    for table, key, error in memory_errors():
        peaks[table, key].append(error)
    print(f"\n{'peak memory':40}{'n':>4}{'error':>10}{'bias':>9}")
    for (table, key), errors in peaks.items():
        error, bias = mean_percent(errors), 100 * mean(errors)
        print(f"{table + ', ' + key:40}{len(errors):4}{error:8.1f} %{bias:+7.1f} %")


def main(arguments: Sequence[str]) -> None:
    """Print the tables; with `--cross`, renew the record first."""
    speed, runs = milliseconds(), published_runs()
    if "--cross" in arguments:
        cross_validate().write(CROSS_VALIDATED)
    record = read_record(CROSS_VALIDATED)
    columns = {"fit": residuals(runs, {}), "fifths": record.fifths, "tables": record.tables}
    print(f"{len(runs)} runs, {speed:.2f} ms an estimate; mean absolute error of a step, percent")
    changed = " and ".join(what_changed(record, published_rows(), runs, read_priors()))
    stale = f"; since then other {changed}: renew them by --cross" if changed else ""
    print(f"fifths of {record.date}, {record.commit}{stale}\n")
    print_steps(columns)
    print_band(columns["fit"])
    print_sweeps({name: columns[name] for name in ("fit", "fifths")})
    print_memory()


if __name__ == "__main__":
    main(sys.argv[1:])
