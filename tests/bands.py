"""The bands of runtime profiles, from cross-validated fits; for benchmarks/accuracy.py.

A spread is a quantile of errors on runs left out (mpctl/measure/calibrate/spread.py). Few errors of one
profile are weak evidence, so those of all profiles, with equal weight, count as `OTHERS` additional
runs. There are three kinds of errors, from three kinds of leaving out (joint_fit.py). `spread`: the
profile had seen the cluster (a fifth of each table left out, or a table whose cluster another table
has). `spread_apart`: it had not (all runs on a cluster left out). An error on a run that was also
outside the profile's runs in k other respects (`step.beyond`) counts as WIDENS^k times smaller;
`widening` is the quantile of the k-th roots of such errors over the errors that the spreads allow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpctl.measure.calibrate.runs import Kind, Run
from mpctl.measure.calibrate.spread import LEAST, quantile, seen_by
from mpctl.measure.calibrate.write import Changes, merged_seen, seen_changes, write_changed
from mpctl.plan.estimate.step import QUANTILE, beyond
from mpctl.spec.runtime import FittedRuns
from tests.joint_fit import LeftOut, Residuals, Values

OTHERS = 10.0  # weight, in runs, of the errors of all profiles
WIDENS = 1.25  # each further respect, before it is measured
ENOUGH = 20  # runs outside the profile's runs that it needs for a fitted widening
WIDEST = 2.0


class Spreads(NamedTuple):
    """The figures of a runtime profile's band, named as its fields; None where no run determines
    one."""

    spread: float | None
    spread_apart: float | None
    widening: float | None


class Miss(NamedTuple):
    """size: |residual| of a run that was left out; ways: respects in which it was outside the seen
    runs."""

    profile: str
    table: str
    size: float
    is_known: bool
    ways: int


def find_spreads(runs: Sequence[Run], left_out: LeftOut) -> dict[str, Spreads]:
    """The spreads of each profile that these runs name, by its name."""
    profiles = dict.fromkeys(run.parts["runtimes"] for run in runs)
    return spreads_of(profiles, list(_misses(runs, left_out)))


def spreads_of(profiles: Iterable[str], misses: Sequence[Miss]) -> dict[str, Spreads]:
    """The spreads of each profile, from these misses."""
    near = _by_profile(miss for miss in misses if miss.is_known)
    apart = _by_profile(miss for miss in misses if not miss.is_known)
    base = {name: Spreads(_spread(near, name), _spread(apart, name), 1.0) for name in profiles}
    wider = []
    for miss in misses:
        if miss.ways and (width := allowed_error(base[miss.profile], miss)):
            wider.append((miss.size / width) ** (1 / miss.ways))
    widening = None
    if len(wider) >= ENOUGH:
        widening = min(max(quantile((size, 1.0) for size in wider), 1.0), WIDEST)
    return {name: spreads._replace(widening=widening) for name, spreads in base.items()}


def allowed_error(spreads: Spreads, miss: Miss) -> float:
    """The error that a band of these spreads allows for the run of this miss."""
    spread = spreads.spread if miss.is_known else spreads.spread_apart
    return QUANTILE * (spread or 0.0) * (spreads.widening or 1.0) ** miss.ways


def _by_profile(misses: Iterable[Miss]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for miss in misses:
        found[miss.profile].append(miss.size / WIDENS**miss.ways)
    return found


def _spread(sizes: Mapping[str, Sequence[float]], profile: str) -> float | None:
    """The spread of a profile's errors and OTHERS of all profiles'; None where there are none."""
    everyone = [size for own in sizes.values() for size in own]
    if not everyone:
        return None
    share = OTHERS / len(sizes)  # of each profile
    pool = [(size, share / len(own)) for own in sizes.values() for size in own]
    own = [(size, 1.0) for size in sizes.get(profile, ())]
    return max(quantile(own + pool) / QUANTILE, LEAST)


def _misses(runs: Sequence[Run], left_out: LeftOut) -> Iterator[Miss]:
    yield from missed(runs, left_out, "fifths")
    yield from (miss for miss in missed(runs, left_out, "tables") if miss.is_known)
    yield from missed(runs, left_out, "clusters")


def missed(runs: Sequence[Run], left_out: LeftOut, kind: str) -> Iterator[Miss]:
    """The misses of one kind of leaving out, compared with the profile's remaining runs. Profiles
    without remaining runs are skipped."""
    residuals: Residuals = getattr(left_out, kind)
    seen: dict[tuple[str, str], FittedRuns | None] = {}
    for run in runs:
        profile, part = run.parts["runtimes"], _part(run, kind)
        if (profile, part) not in seen:
            seen[profile, part] = _remaining(runs, profile, kind, part)
        known = seen[profile, part]
        if known is not None:
            profile_then = run.profile.model_copy(update={"seen": known})
            ways = sum(1 for _ in beyond(run.job, run.layout.table, profile_then))
            is_known = run.job.cluster.name in known.clusters
            sizes = map(abs, residuals.get(run.id, ()))
            yield from (Miss(profile, run.group, size, is_known, ways) for size in sizes)


def _part(run: Run, kind: str) -> str:
    """The part that was left out with the run; a fifth of a table removes no cluster or
    software."""
    return {"tables": run.group, "clusters": run.parts["clusters"]}.get(kind, "")


def _remaining(runs: Sequence[Run], profile: str, kind: str, part: str) -> FittedRuns | None:
    own = [run for run in runs if run.parts["runtimes"] == profile]
    others = [run for run in own if not part or _part(run, kind) != part]
    return seen_by(others) if others else None


def write_presets(runs: Sequence[Run], values: Values, directory: Path, left_out: LeftOut | None = None) -> list[Path]:
    """Write DIRECTORY/KIND/NAME.toml for each preset with a fitted constant; returns the paths.

    left_out: residuals of cross-validation, from which runtime profiles get their spreads; without
    them they keep the old ones.
    """
    spreads = find_spreads(runs, left_out) if left_out else {}
    changes: dict[tuple[Kind, str], Changes] = {}
    for constant, value in values.items():
        for name in constant.names:
            changes.setdefault((constant.kind, name), {})[constant.path] = value
    for (kind, name), own in changes.items():
        if kind == "runtimes":
            own |= _profile([run for run in runs if run.parts[kind] == name], spreads.get(name))
    return write_changed(runs, changes, directory)


def _profile(runs: Sequence[Run], spreads: Spreads | None) -> Changes:
    """Changes of a runtime profile other than constants, by dotted path.

    These are the devices, clusters, dtypes and sizes of its runs, added to those that it names, and
    its spreads.
    """
    found = seen_changes(merged_seen(runs[0].profile.seen, seen_by(runs)))
    found_spreads = spreads._asdict() if spreads else {}
    return found | {name: value for name, value in found_spreads.items() if value is not None}
