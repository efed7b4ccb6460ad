"""The layouts that a tuning may measure, with their plans; and what trials teach the planner.

Every legal layout that fits is planned where there are at most SMALL of them; of larger spaces
those that a search of CLASSES combinations of tp, pp and experts has estimated on its way to the
fastest (plan/search/find.py), which are those that its bounds could not rule out. Candidates are the
MOST fastest of them, and the fastest of each way to split the ranks.

The plan's band is how far single runs of any system are from their plan. A part of that,
OF_LAYOUT, is an error of the layout; the rest is one that all layouts of a system share, and
decides nothing. The planner's figures that `mpctl calibrate` would fit to own runs
(measure/calibrate/own.py) may be wrong by a standard deviation of their priors each: what that changes is
found by moving one after the other by STEP of it. Figures that move all layouts alike are left out:
PROBES layouts tell which.

By hand, a band from 471 to 775 ms of a plan of 604 ms: a spread of log(775 / 471) / 2 / 1.645 =
0.15, of which 0.09 is the layout's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import exp, log
from statistics import fmean
from typing import Any, NamedTuple

from mpctl.core.errors import InputError
from mpctl.measure.calibrate.own import fit_own, free_figures, own_presets
from mpctl.measure.calibrate.own_fit import FreeFigure
from mpctl.measure.calibrate.runs import Run, preset_of_cluster, read_runs, with_values
from mpctl.measure.tune.choose import Candidate
from mpctl.measure.tune.state import TrialRecord, TuneFolder
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.estimate.step import QUANTILE
from mpctl.plan.planning.layout_settings import LayoutSettings, layout_text
from mpctl.plan.search.evaluate import LayoutEvaluator
from mpctl.plan.search.find import EvaluatedLayout, Progress, find_layouts
from mpctl.plan.search.space import SearchSpace
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.presets import lasting_name
from mpctl.spec.runtime import RuntimeProfile

SMALL, CLASSES, MOST = 2000, 24, 160
OF_LAYOUT = 0.6
LEAST_SPREAD = 0.02
STEP, PROBES, ALIKE = 0.5, 8, 0.01
OWN_CLUSTER = ("nodes", "gpus_per_node", "headroom")
WAYS = ("tensor_mode", "tp", "cp", "pp", "ep", "schedule")


class Learnt(NamedTuple):
    """The system as fitted to trials. cluster, profile: with the fitted figures; words: the findings."""

    cluster: ClusterSpec
    profile: RuntimeProfile
    words: tuple[str, ...] = ()


@dataclass
class Pool:
    """The layouts of one space, planned on the presets or on what was learnt. typed: the settings
    of the command line, for the name of the cluster's preset."""

    space: SearchSpace
    typed: Mapping[str, Any] = field(default_factory=dict)
    learnt: Learnt | None = None

    @cached_property
    def evaluator(self) -> LayoutEvaluator:
        """Plans layouts. Raises InputError where the device states no rate."""
        if self.learnt is None:
            return _evaluator(self.space, self.space.job.cluster, None)
        return _evaluator(self.space, self.learnt.cluster, self.learnt.profile)

    def candidates(self, on_progress: Progress | None = None) -> list[Candidate]:
        """The layouts that may be measured, fastest first; none where none fits."""
        points = self.search(on_progress)
        self._probe(points[:: max(1, len(points) // PROBES)])
        return [self._candidate(point) for point in points]

    def search(self, on_progress: Progress | None = None) -> list[EvaluatedLayout]:
        """The same without their spreads and slopes."""
        is_small = next(islice(self.space.layouts(), SMALL, None), None) is None
        found = find_layouts(
            self.evaluator.space, top=CLASSES, exhaustive=is_small, evaluator=self.evaluator, on_progress=on_progress
        )
        if not found.is_complete:
            raise KeyboardInterrupt
        limit = self.evaluator.usable_memory
        fitting = sorted(point for point in found.evaluated if point.bytes <= limit)
        ways = {tuple(getattr(p.layout, name) for name in WAYS): p for p in reversed(fitting)}
        first = set(ways.values())
        return [p for at, p in enumerate(fitting) if at < MOST or p in first]

    def candidate(self, layout: LayoutSettings) -> Candidate | None:
        """A layout with its plan; None where its step cannot be timed."""
        seconds = self.evaluator.step_seconds(layout)
        if seconds is None:
            return None
        size = self.evaluator.device_bytes(layout)
        return self._candidate(EvaluatedLayout(seconds, size, layout))

    def _candidate(self, point: EvaluatedLayout) -> Candidate:
        layout = point.layout
        if (mode := layout.tensor_mode) not in self._spreads:
            self._spreads[mode] = self._spread(layout)
        slopes = tuple(_slope(evaluator, point, step) for evaluator, step in self._moved)
        return Candidate(layout, point.step_seconds, self._spreads[mode], point.bytes, slopes)

    @cached_property
    def _spreads(self) -> dict[str, float]:
        return {}

    def _spread(self, layout: LayoutSettings) -> float:
        time = self.evaluator.step_time(layout)
        assert time is not None, "it was timed before"
        return max(OF_LAYOUT * log(time.high / time.low) / 2 / QUANTILE, LEAST_SPREAD)

    def _probe(self, points: Sequence[EvaluatedLayout]) -> None:
        """Find the figures that do not move all of these layouts alike."""
        if not points:
            return
        cluster, profile = self.evaluator.space.job.cluster, self.evaluator.profile
        for figure in self._figures(points[0].layout):
            step = STEP if figure.value(2 * STEP) < figure.most else -STEP
            there = with_values(cluster, profile, {figure.constant: figure.value(step)})
            evaluator = _evaluator(self.space, *there)
            slopes = [_slope(evaluator, point, step) for point in points]
            if max(slopes) - min(slopes) > ALIKE:
                self._moved.append((evaluator, step))

    @cached_property
    def _moved(self) -> list[tuple[LayoutEvaluator, float]]:
        """An evaluator with one figure moved, and by how many standard deviations."""
        return []

    def _figures(self, layout: LayoutSettings) -> list[FreeFigure]:
        """The figures that own runs may move; none where the cluster is that of no preset."""
        try:
            row = run_row(self.space, layout, 1.0, self.typed)
        except InputError:
            return []
        return free_figures(read_runs([row]))


def _slope(evaluator: LayoutEvaluator, point: EvaluatedLayout, step: float) -> float:
    """The change of the logarithm of a layout's seconds for one standard deviation of a figure."""
    return log((evaluator.step_seconds(point.layout) or point.step_seconds) / point.step_seconds) / step


def _evaluator(space: SearchSpace, cluster: ClusterSpec, profile: RuntimeProfile | None) -> LayoutEvaluator:
    job = space.job.model_copy(update={"cluster": cluster})
    try:
        evaluator = LayoutEvaluator(replace(space, job=job))
    except MissingFigure as missing:
        hint = "use a device preset that states it, or another training.dtype"
        raise InputError.of("no-step-time", "cluster.device", str(missing), hint) from None
    evaluator.profile = profile or evaluator.profile
    return evaluator


def learn(
    space: SearchSpace, trials: Sequence[TrialRecord], typed: Mapping[str, Any], folder: TuneFolder
) -> Learnt | None:
    """Fit the measured trials and write the presets to the folder; None with fewer than two layouts.
    typed: the settings of the command line, for the name of the cluster's preset. Raises InputError if
    the runs cannot be fitted, for example because no preset has the cluster's name."""
    runs = tuning_runs(space, trials, typed)
    if len(runs) < 2:
        return None
    fit = fit_own(runs)
    own_presets(fit, folder.presets)
    cluster, profile = with_values(runs[0].job.cluster, runs[0].profile, fit.values)
    return Learnt(cluster, profile, tuple(fit.learnt))


def tuning_runs(space: SearchSpace, trials: Sequence[TrialRecord], typed: Mapping[str, Any]) -> list[Run]:
    """A run for each measured layout: the geometric mean of its trials."""
    times: dict[LayoutSettings, list[float]] = {}
    for trial in trials:
        if trial.status == "measured" and trial.step_seconds is not None:
            times.setdefault(trial.settings, []).append(trial.step_seconds)
    rows = [run_row(space, layout, exp(fmean(map(log, seconds))), typed) for layout, seconds in times.items()]
    return read_runs(rows)


def run_row(space: SearchSpace, layout: LayoutSettings, seconds: float, typed: Mapping[str, Any]) -> dict[str, Any]:
    """A measured layout as a row that `mpctl calibrate` reads. Raises InputError where the cluster
    is that of no preset."""
    job = space.job_of(layout).model_dump(mode="json", exclude_none=True)
    own, named = job["cluster"], typed.get("cluster")
    preset = named if isinstance(named, str) else preset_of_cluster(own, where="cluster")
    kept = {key: own[key] for key in OWN_CLUSTER if key in own}
    job["cluster"] = {**kept, "preset": lasting_name("clusters", preset)}
    measured = {"step_seconds": seconds}
    return {"id": layout_text(layout), "group": "tune", "job": job, "measured": measured}
