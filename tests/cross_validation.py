"""The record of a cross-validation, and how good its estimates are: sweeps, regret, bands.

The fits take minutes, so that tests and tables read the record: the residuals of every published
run under the presets, and by constants that were fitted without it. It says from what it was made:
the rows of the runs and the constants with their priors (SHA-256), and the residuals of then.

A sweep is a set of runs with the same model, global batch, data type, cluster and number of GPUs.
They differ only in their layout, so that the estimate should put them in the measured order.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from mpctl.measure.bench.verify import LEAST_SWEEP
from mpctl.measure.calibrate.runs import Run, get_value
from tests.bands import allowed_error, missed, spreads_of
from tests.joint_fit import LeftOut, Residuals, constants_of, get_prior

DIGITS = 6  # of a residual
TOLERANCE = 1e-5  # by which an unchanged estimate may differ between machines


@dataclass(frozen=True)
class CrossRecord:
    """The residuals of all runs, and from what they were made.

    fitted: residuals by run id under the presets; fifths: under constants that were fitted without
    the fold of the run; tables: without its table; clusters: without its cluster. date, commit:
    when and with which code.
    """

    date: str
    commit: str
    rows_sha256: str
    constants_sha256: str
    fitted: Residuals
    fifths: Residuals
    tables: Residuals
    clusters: Residuals

    @property
    def left_out(self) -> LeftOut:
        """The residuals of runs that a fit did not see."""
        return LeftOut(self.fifths, self.tables, self.clusters)

    def write(self, path: Path) -> None:
        """Write the record as JSON, one run a line."""
        table = asdict(self)
        lines = [f" {json.dumps(key)}: {_value(value)}" for key, value in table.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def _value(value: object) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    rounded = {key: [round(r, DIGITS) for r in rs] for key, rs in value.items()}
    rows = (f"  {json.dumps(key)}: {json.dumps(rs)}" for key, rs in rounded.items())
    return "{\n" + ",\n".join(rows) + "\n }"


def read_record(path: Path) -> CrossRecord:
    """The record in a file that `CrossRecord.write` wrote."""
    return CrossRecord(**json.loads(path.read_text("utf-8")))


def hash_json(value: object) -> str:
    """SHA-256 of a value's JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def what_changed(
    record: CrossRecord,
    rows: Sequence[Mapping[str, Any]],
    runs: Sequence[Run],
    priors: Mapping[str, float],
    fitted: Residuals,
) -> list[str]:
    """What has changed since the record was made, of "rows", "constants" and "estimate".

    fitted: today's residuals of the runs under the presets.
    """
    changed = {
        "rows": hash_json(rows) != record.rows_sha256,
        "constants": hash_json(constant_values(runs, priors)) != record.constants_sha256,
        "estimate": not _are_close(fitted, record.fitted),
    }
    return [name for name, is_changed in changed.items() if is_changed]


def _are_close(first: Residuals, second: Residuals) -> bool:
    return first.keys() == second.keys() and all(
        abs(a - b) <= TOLERANCE for key in first for a, b in zip(first[key], second[key], strict=True)
    )


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


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """How much faster the best run is than the one with the best estimate, as a share.

    pairs: measured and estimated samples per second.

    >>> regret([(10.0, 8.0), (11.0, 7.0)])  # the estimate chooses the first, which is 10 % slower
    0.10000000000000009
    """
    chosen = max(pairs, key=lambda pair: pair[1])[0]
    return max(measured for measured, _ in pairs) / chosen - 1


def order_of_pairs(pairs: Sequence[tuple[float, float]], near: float) -> tuple[list[bool], list[bool]]:
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
        values[constant.key] = [get_value(preset, constant.path), get_prior(preset, constant, priors)]
    return values


def find_inside(runs: Sequence[Run], left_out: LeftOut) -> dict[str, list[bool]]:
    """Whether each run that was left out lies inside a band made of the errors of other tables
    alone, by what was left out with it (`LeftOut`'s fields)."""
    profiles = dict.fromkeys(run.parts["runtimes"] for run in runs)
    found: dict[str, list[bool]] = {name: [] for name in LeftOut._fields}
    misses = {name: list(missed(runs, left_out, name)) for name in LeftOut._fields}
    for table in dict.fromkeys(run.group for run in runs):
        others = [m for kind in misses.values() for m in kind if m.table != table]
        spreads = spreads_of(profiles, others)
        for name, kind in misses.items():
            own = (miss for miss in kind if miss.table == table)
            found[name] += [miss.size <= allowed_error(spreads[miss.profile], miss) for miss in own]
    return found
