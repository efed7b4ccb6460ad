"""How far the planner's estimates are from published runs: `python -m benchmarks.accuracy`.

For every table of tests/recorded: mean absolute error of step seconds under the
presets' constants (`fit`), by constants that were fitted without each fifth of a table (`fifths`),
with the gate for these errors, without each full table (`tables`) and without all runs on a cluster
(`clusters`); how many of the latter three are inside a band fitted to other tables. Over sweeps
(runs of one model, batch, dtype, cluster and number of GPUs): Spearman's rank correlation of
measured and estimated speed, and the regret, by how much the run that the planner would have chosen
is slower than the best one. Memory errors where a run publishes its peak. Rows with experts are
listed by table, under the job alone and with what their details say of the software; runs of
systems that no preset was fitted to are listed by system.

`--cross` computes them again and writes tests/recorded/cross_validated.json, which
tests/measure/calibrate/test_accuracy.py checks (some minutes). `--fit` also writes the constants fitted to
all runs into presets/; `--renew` keeps the record, and updates the presets' description of the
runs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from statistics import mean, median

from mpctl.measure.bench.verify import spearman
from mpctl.plan.estimate.job import Estimate
from mpctl.plan.estimate.time import find_step_time
from mpctl.spec.presets import presets_root
from tests.bands import write_presets
from tests.cross_validation import (
    CrossRecord,
    constant_values,
    find_inside,
    find_sweeps,
    hash_json,
    optimism,
    read_record,
    regret,
    samples_per_second,
    what_changed,
)
from tests.joint_fit import LeftOut, Residuals, constants_of, leave_out, open_fit, residuals
from tests.outside import OutsideRun, outside_runs, summary
from tests.published import (
    CROSS_VALIDATED,
    EXPERT_TABLE,
    EXPERTS,
    GATES,
    errors_by_gate,
    expert_errors,
    gate_of,
    mean_percent,
    published_rows,
    published_runs,
    read_priors,
)

ROUNDS = 4  # of the fit to all runs, which begins at the presets
GIB = {"gb": 1e9, "gib": 2**30}
# Which figure of the estimate a published peak is compared with: nvidia-smi counts context and
# libraries too.
MEASURES = {
    "peak_mem_gb": "allocated_bytes",
    "peak_mem_gib_allocated": "allocated_bytes",
    "peak_mem_gib_reserved": "reserved_bytes",
    "peak_mem_gb_nvidia_smi": "device_bytes",
}


def cross_validate(*, writes_presets: bool) -> CrossRecord:
    """Fit to all runs, then without each fifth, each table and each cluster: minutes.

    writes_presets: whether the constants fitted to all runs go into presets/.
    """
    runs, priors = published_runs(), read_priors()
    with open_fit(runs, constants_of(runs), priors) as fit:
        whole = fit.solve(rounds=ROUNDS)
        left_out = leave_out(fit, whole)
    if writes_presets:
        write_presets(runs, fit.values(whole.shift), presets_root(), left_out)
    return make_record(left_out)


def make_record(left_out: LeftOut) -> CrossRecord:
    """The record of residuals of runs left out, for the current rows, presets and estimates."""
    runs, line = published_runs(), ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    return CrossRecord(
        date=date.today().isoformat(),
        commit=commit,
        rows_sha256=hash_json(published_rows()),
        constants_sha256=hash_json(constant_values(runs, read_priors())),
        fitted=residuals(runs, {}),
        **left_out._asdict(),
    )


def memory_errors() -> Iterator[tuple[str, str, float]]:
    """For every published peak: gate, the measured figure, and the estimate's relative error.
    Nanotron's are in benchmarks/memory_accuracy.py."""
    for run in published_runs():
        if run.group == "nanotron":
            continue
        for key, value in run.measured.items():
            if not key.startswith("peak_mem"):
                continue
            estimate = Estimate(run.layout)
            peak = max(getattr(stage, MEASURES[key]) for stage in estimate.memory)
            unit = GIB["gib" if "gib" in key else "gb"]
            yield gate_of(run), key, peak / (value * unit) - 1


def milliseconds() -> float:
    """The mean time of one estimate, the first of its job."""
    started = time.perf_counter()
    for run in published_runs():
        find_step_time(run.layout)
    return 1e3 * (time.perf_counter() - started) / len(published_runs())


def print_steps(columns: Mapping[str, Residuals]) -> None:
    """One row a gate: the mean absolute error under each column's constants."""
    errors = {name: errors_by_gate(column) for name, column in columns.items()}
    print(f"{'table':24}{'n':>5}{'gate':>7}" + "".join(f"{name:>9}" for name in columns) + f"{'median':>8}{'bias':>7}")
    for table, gate in GATES.items():
        fit = errors["fit"][table]
        shown = "".join(f"{mean_percent(column[table]):9.1f}" for column in errors.values())
        rest = f"{100 * median(map(abs, fit)):8.1f}{100 * mean(fit):+7.1f}"
        print(f"{table:24}{len(fit):5}{gate:7.0f}{shown}{rest}")


def print_sweeps(columns: Mapping[str, Residuals]) -> None:
    """One row a table of sweeps and column: how many, rank correlation, regret, optimism."""
    sweeps = find_sweeps(published_runs())
    print(f"\n{'sweeps of':32}{'':10}{'n':>4}{'spearman':>10}{'regret: mean':>14}{'median':>9}{'optimism':>11}")
    tables = dict.fromkeys(runs[0].group for runs in sweeps.values())
    for table in (*tables, None):
        own = [runs for runs in sweeps.values() if table in (runs[0].group, None)]
        for name, column in columns.items():
            pairs = [samples_per_second(runs, column) for runs in own]
            regrets = [100 * regret(pair) for pair in pairs]
            print(
                f"{table or 'all':32}{name:10}{len(own):4}{mean(map(spearman, pairs)):10.2f}"
                f"{mean(regrets):12.1f} %{median(regrets):7.1f} %"
                f"{100 * mean(map(optimism, pairs)):9.1f} %"
            )


def print_band(record: CrossRecord) -> None:
    """How many of the runs left out are inside a band of nine of ten that was fitted without their
    table."""
    print(f"\n{'inside the band of 90 %':32}{'n':>6}{'inside':>9}")
    for name, inside in find_inside(published_runs(), record.left_out).items():
        print(f"{name + ' left out':32}{len(inside):6}{100 * mean(inside):7.0f} %")


def print_experts() -> None:
    """One row a table of runs with experts."""
    job, software = expert_errors(), expert_errors(software=True)
    print(f"\n{'steps with experts':24}{'n':>5}{'gate':>7}{'job':>9}{'software':>10}{'bias':>7}")
    every = {"all": [error for own in job.values() for error in own]}
    also = {"all": [error for own in software.values() for error in own]}
    for table, errors in {**job, **every}.items():
        gate = EXPERTS if table == "all" else EXPERT_TABLE
        known = mean_percent((software | also)[table])
        print(f"{table:24}{len(errors):5}{gate:7.0f}{mean_percent(errors):9.1f}{known:10.1f}{100 * mean(errors):+7.1f}")


def print_memory() -> None:
    """One row a kind of published peak."""
    peaks: dict[tuple[str, str], list[float]] = defaultdict(list)
    for table, key, error in memory_errors():
        peaks[table, key].append(error)
    print(f"\n{'peak memory':40}{'n':>4}{'error':>10}{'bias':>9}")
    for (table, key), errors in peaks.items():
        error, bias = mean_percent(errors), 100 * mean(errors)
        print(f"{table + ', ' + key:40}{len(errors):4}{error:8.1f} %{bias:+7.1f} %")


def print_outside() -> None:
    """One row a system that no preset was fitted to: the error of its plans, the share inside their
    band, and the bias without the shift of unknown systems."""
    systems: dict[str, list[OutsideRun]] = defaultdict(list)
    for run in outside_runs():
        systems[run.system].append(run)
    print(f"\n{'systems that no preset knows':32}{'n':>4}{'error':>9}{'bias':>7}{'inside':>8}{'unshifted':>11}")
    for name, runs in systems.items():
        error, bias, inside = summary(runs)
        plain = mean((1 + run.error) / run.factor - 1 for run in runs)
        print(f"{name:32}{len(runs):4}{100 * error:7.1f} %{100 * bias:+7.1f}{100 * inside:6.0f} %{100 * plain:+11.1f}")


def main(arguments: Sequence[str]) -> None:
    """Print the tables, after fitting and updating the record if the options ask for it."""
    if {"--cross", "--fit"} & set(arguments):
        cross_validate(writes_presets="--fit" in arguments).write(CROSS_VALIDATED)
    if "--fit" in arguments:  # the presets read before are outdated
        subprocess.run([sys.executable, "-m", "benchmarks.accuracy", "--renew"], check=True)
        return
    speed, runs = milliseconds(), published_runs()
    record = read_record(CROSS_VALIDATED)
    if "--renew" in arguments:
        record = make_record(record.left_out)
        record.write(CROSS_VALIDATED)
    columns = {"fit": residuals(runs, {}), **record.left_out._asdict()}
    print(f"{len(runs)} runs, {speed:.2f} ms an estimate; mean absolute error of a step, percent")
    found = what_changed(record, published_rows(), runs, read_priors(), columns["fit"])
    changed = " and ".join(found)
    stale = f"; since then other {changed}: renew them by --cross" if changed else ""
    print(f"fifths of {record.date}, {record.commit}{stale}\n")
    print_steps(columns)
    print_band(record)
    print_sweeps({name: columns[name] for name in ("fit", "fifths", "tables")})
    print_experts()
    print_outside()
    print_memory()


if __name__ == "__main__":
    main(sys.argv[1:])
