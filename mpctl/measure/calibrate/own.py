"""Fitting the figures of one's own system to its runs: few runs move what they can tell.

A system is a software on a device in a cluster. Every figure of its presets that a step depends on
may move (`FREE`), as far as its prior allows: the factor on all seconds as far as systems differ
that no preset was fitted to, the others as far as fits to published systems moved them apart. The
posterior (posterior.py) of a linear model in these shifts is found at the slopes measured at the
presets, and again at those measured where it ends; a step that makes things worse is halved. Runs
then move what they determine, alone or together; what none of them depends on stays, and counts as
unknown as before.

A run to come is within the band of the fit in nine of ten cases. Its half width is A from the
posterior, A^2 = 1.645^2 v + 2.132^2 s^2, of the mean variance v of an estimate that did not see
its run and the noise s; and E from the runs left out in turn, the k-th smallest of their n errors,
k = ceil(0.9 (n + 1)), as of any band (spread.py). A counts as TRUSTED runs, E as n: few runs widen
it by what systems are like, many by what they showed.

By hand, 10 runs, A = 0.1 and E = 0.2: sqrt((10 x 0.01 + 10 x 0.04) / 20) = 0.158, a spread of
0.096.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt
from operator import mul
from pathlib import Path
from statistics import fmean

from mpctl.core.errors import InputError
from mpctl.measure.calibrate.own_fit import FreeFigure, OwnFit, residuals_at, slopes_at
from mpctl.measure.calibrate.own_words import doubt_words, is_elsewhere, learnt_words, telling_words
from mpctl.measure.calibrate.posterior import STUDENT, Posterior, cost, find_posterior
from mpctl.measure.calibrate.repeats import Repeats, find_repeats
from mpctl.measure.calibrate.runs import LARGEST_PART, LAYERS, PASSES, SHARES, WAYS, Constant, Kind, Run, get_value
from mpctl.measure.calibrate.spread import LEAST, quantile, seen_by
from mpctl.measure.calibrate.write import Changes, merged_seen, number, seen_changes, write_changed
from mpctl.plan.estimate.step import QUANTILE
from mpctl.plan.estimate.system import find_system
from mpctl.spec.runtime import RuntimeProfile

# How far runs may move each figure: one standard deviation of its prior. "log": of the figure's
# logarithm; a number: of the figure itself, in its unit, which also moves figures that are 0.
# Chosen so that runs of whole sweeps left out are estimated best from 5, 20 and 40 others of the
# sweep (benchmarks/results/measurements.md).
LOG = 0.0
Free = Mapping[Kind, Mapping[str, tuple[float, float]]]
FREE: Free = {
    "clusters": {
        "step_factor": (0.13, LOG),
        "intra_node.efficiency": (0.25, LOG),
        "intra_node.start": (1.5, LOG),
        "intra_node.latency": (0.5, LOG),
        "inter_node.efficiency": (0.2, LOG),
        "inter_node.start": (0.7, LOG),
        "inter_node.latency": (0.4, LOG),
        "inter_node.decay": (1.0, 0.1),
    },
    "devices": {
        "kernels.products": (0.05, LOG),
        "kernels.memory": (0.1, LOG),
        "kernels.flash": (0.1, LOG),
        "kernels.flash_backward": (0.2, LOG),
        "kernels.misaligned": (0.08, LOG),
        "kernels.unaligned": (0.3, LOG),
        "kernels.narrow.fp8": (0.1, LOG),
        "kernels.narrow.mxfp8": (0.1, LOG),
        "kernels.narrow.nvfp4": (0.1, LOG),
        "kernels.depth": (0.5, LOG),
        "kernels.waves": (1.0, 0.4),
        "kernels.launch": (2.0, LOG),
        "kernels.host": (0.4, LOG),
    },
    "runtimes": {
        "operators.passes": (0.2, LOG),
        "operators.gradient_bytes": (0.3, LOG),
        "operators.optimizer_bytes": (0.6, LOG),
        "operators.cast_bytes": (0.4, LOG),
        "overlap.tp": (1.0, 0.3),
        "overlap.pp": (1.0, 0.3),
        "overlap.dp": (1.0, 0.3),
        "overlap.gather": (1.0, 0.3),
        "overlap.zero": (1.0, 0.3),
        "overlap.products": (1.0, 0.3),
        "overlap.cp": (1.0, 0.2),
        "overlap.drag": (1.0, 0.05),
        "host.layer": (0.5, LOG),
        "host.split": (1.0, 1.5e-4),
        "host.rank_in_pipeline": (1.0, 3e-4),
        "host.micro_batch": (1.0, 5e-4),
        "host.message": (1.0, 3e-4),
        "host.sync": (1.0, 5e-4),
        "host.step": (1.0, 5e-3),
        "experts.grouped": (0.15, LOG),
        "experts.wait": (0.5, LOG),
        "experts.exchange": (0.2, LOG),
        "experts.once": (0.2, LOG),
        # Of layers of one shape: what kernel libraries and protocols of messages make of it.
        LAYERS: (0.06, LOG),
    },
}
# Figures of a machine whose kernels and collectives were measured one by one (measure/bench/machine.py),
# so that its runs correct few of them. Products and attention hardly move, memory as far as caches
# go. Ranks that call a collective again and again arrive together; ranks that compute in between
# wait for the last one, so its start moves most. The software's profile stays unchanged.
MACHINE: Free = {
    "devices": {
        "kernels.products": (0.05, LOG),
        "kernels.memory": (0.2, LOG),
        "kernels.flash": (0.1, LOG),
        "kernels.flash_backward": (0.1, LOG),
        "kernels.host": (0.5, LOG),
    },
    "clusters": {
        "intra_node.efficiency": (0.3, LOG),
        "intra_node.latency": (0.5, LOG),
        "intra_node.start": (2.0, LOG),
        "inter_node.efficiency": (0.3, LOG),
    },
}
PARTS = ("kernels.waves", "overlap.gather", "overlap.drag", "experts.grouped", *SHARES)
LINEARIZED = 3  # times that slopes are measured, at most
CHORDS = 3  # solutions by the same slopes, each from the residuals where the last one ended
HALVED = 4  # times that a step is halved until it gains
NEAR = 0.004  # between a residual and that of the linear model: near enough
TRUSTED = 10.0  # runs that the half width from the posterior counts as
FACTOR = "step_factor"


def fit_own(runs: Sequence[Run], free: Free = FREE) -> OwnFit:
    """Fit the figures of these runs' systems: the cluster, the device and the runtime profile of
    each, which systems that share a preset share. Repeats of a job count as one run. free: which
    figures may move, and how far. Raises InputError where a run cannot be estimated, ValueError
    without runs."""
    if not runs:
        raise ValueError("a fit needs a run")
    repeats = find_repeats(runs)
    system = _OwnRuns([found.run for found in repeats], free_figures(runs, free), repeats)
    start = [0.0] * len(system.figures)
    before = system.residuals(start)
    posterior, slopes = system.find(start, before)
    spreads = {name: system.spread(name, posterior) for name in _profiles(runs)}
    fit = OwnFit(
        runs,
        system.figures,
        posterior,
        slopes,
        [repeats[at].numbers[0] for at in system.owner],
        system.by_run(before),
        system.by_run(posterior.left),
        system.by_run(posterior.left_out),
        spreads,
    )
    contradictions = [text for found in repeats if (text := found.contradiction)]
    return replace(
        fit, doubts=[*contradictions, *doubt_words(fit)], learnt=learnt_words(fit), telling=telling_words(fit)
    )


@dataclass(frozen=True)
class _OwnRuns:
    """Runs of different jobs and the figures that they may move; residuals of all runs stand in one
    row. repeats: which runs each of them stands for."""

    runs: Sequence[Run]
    figures: Sequence[FreeFigure]
    repeats: Sequence[Repeats]

    @cached_property
    def own(self) -> list[list[int]]:
        """Numbers of the figures that each run depends on."""
        numbers = range(len(self.figures))
        return [[i for i in numbers if run.has(self.figures[i].constant)] for run in self.runs]

    @cached_property
    def owner(self) -> list[int]:
        """The number of each residual's run."""
        counts = (1 if "step_seconds" in run.measured else len(WAYS) for run in self.runs)
        return [at for at, count in enumerate(counts) for _ in range(count)]

    @cached_property
    def far(self) -> list[int]:
        """Numbers of the figures that may move far."""
        return [i for i, figure in enumerate(self.figures) if figure.path == FACTOR]

    def find(self, shifts: list[float], residuals: list[float]) -> tuple[Posterior, list[list[float]]]:
        """The posterior, and the slopes of the residuals where it ends. shifts, residuals: where to
        begin."""
        for _ in range(LINEARIZED):
            slopes = self.slopes(shifts, residuals)
            begin = residuals
            for _ in range(CHORDS):
                posterior = self.solve(shifts, residuals, slopes)
                shifts, residuals, is_near = self._nearer(shifts, residuals, posterior)
                if is_near:
                    break
            if max(abs(a - b) for a, b in zip(begin, residuals, strict=True)) < NEAR:
                break
        posterior = self.solve(shifts, residuals, slopes)
        return posterior._replace(shifts=shifts, left=residuals), slopes

    def _nearer(
        self, shifts: list[float], residuals: list[float], posterior: Posterior
    ) -> tuple[list[float], list[float], bool]:
        """Shifts and residuals nearer to the posterior's, and whether another step by the same
        slopes is not worth it; a step that makes things worse is halved."""
        here, new = cost(residuals, shifts, posterior.noise, self.far), posterior.shifts
        for halved in range(HALVED):
            there = self.residuals(new)
            if cost(there, new, posterior.noise, self.far) <= here:
                off = max(abs(a - b) for a, b in zip(there, posterior.left, strict=True))
                return new, there, off < NEAR or halved > 0
            new = [(a + b) / 2 for a, b in zip(new, shifts, strict=True)]
        return shifts, residuals, True

    def residuals(self, shifts: Sequence[float]) -> list[float]:
        """Residuals of all runs at these shifts."""
        pairs = zip(self.runs, self.own, strict=True)
        return [r for run, own in pairs for r in residuals_at(run, self.figures, own, shifts)]

    def slopes(self, shifts: Sequence[float], residuals: Sequence[float]) -> list[list[float]]:
        rows = [[0.0] * len(self.figures) for _ in residuals]
        at = 0
        for run, own in zip(self.runs, self.own, strict=True):
            count = self.owner.count(self.owner[at])
            here = residuals[at : at + count]
            for i, changes in slopes_at(run, self.figures, own, shifts, here).items():
                for k, change in enumerate(changes):
                    rows[at + k][i] = change
            at += count
        return rows

    def solve(
        self, shifts: Sequence[float], residuals: Sequence[float], slopes: Sequence[Sequence[float]]
    ) -> Posterior:
        """The posterior of the linear model that has these residuals and slopes at these shifts."""
        rows = zip(residuals, slopes, strict=True)
        start = [r - sum(map(mul, row, shifts)) for r, row in rows]
        lows = [figure.shift(figure.least) for figure in self.figures]
        highs = [figure.shift(figure.most) for figure in self.figures]
        return find_posterior(start, slopes, lows, highs, self.far)

    def by_run(self, row: Sequence[float]) -> dict[str, list[float]]:
        """Residuals of all runs by their ids, repeats each with its own."""
        found: dict[str, list[float]] = {}
        for at, repeats in enumerate(self.repeats):
            for run, own in zip(repeats.runs, self._of_repeats(at, row), strict=True):
                found.setdefault(run.id, []).extend(own)
        return found

    def _of_repeats(self, at: int, row: Sequence[float]) -> list[list[float]]:
        """The residuals of each repeat of a run."""
        here = [value for owner, value in zip(self.owner, row, strict=True) if owner == at]
        return [[value + off for value, off in zip(here, offsets, strict=True)] for offsets in self.repeats[at].offsets]

    def spread(self, profile: str, posterior: Posterior) -> float:
        """The spread of a profile's band, from the runs that name it."""
        mine = [k for k, at in enumerate(self.owner) if self.runs[at].parts["runtimes"] == profile]
        errors = []
        for at in dict.fromkeys(self.owner[k] for k in mine):
            repeated = self._of_repeats(at, posterior.left_out)
            errors += [(abs(value), 1 / len(repeated)) for own in repeated for value in own]
        scatter = fmean(self.repeats[self.owner[k]].variance for k in mine)
        unsure = fmean(posterior.unsure[k] for k in mine)
        return band_spread(errors, unsure + scatter, posterior.noise)


def band_spread(errors: Sequence[tuple[float, float]], unsure: float, noise: float) -> float:
    """The spread of a band. errors: of runs left out, each with its weight; unsure: variance of an
    estimate, and of repeats; noise: scale of a run's own.

    >>> band_spread([(0.2, 1.0)] * 10, 0.1**2 / QUANTILE**2, 0.0) * QUANTILE  # module's example
    0.15811388300841897
    """
    told = QUANTILE**2 * unsure + STUDENT**2 * noise**2
    shown, count = quantile(errors) ** 2, sum(weight for _, weight in errors)
    width = sqrt((TRUSTED * told + count * shown) / (TRUSTED + count))
    return max(width / QUANTILE, LEAST)


def _profiles(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.parts["runtimes"] for run in runs))


def free_figures(runs: Sequence[Run], free: Free = FREE) -> list[FreeFigure]:
    """The figures of the presets that these runs use and that may move, each once."""
    found: dict[tuple[object, ...], FreeFigure] = {}
    for run in runs:
        for kind, paths in free.items():
            for path, (slack, unit) in paths.items():
                key = kind, run.parts[kind], path, run.layers if path == LAYERS else None
                if key not in found and (figure := _figure(run, kind, path, slack, unit)):
                    found[key] = figure
    return list(found.values())


def _figure(run: Run, kind: Kind, path: str, slack: float, unit: float) -> FreeFigure | None:
    """The figure of the run's preset at this path; None where the preset has none that may move."""
    layers, most = None, inf
    if path == FACTOR:
        stated: float | None = find_system(run.job.cluster, run.profile).factor
    elif path == LAYERS:
        layers = run.layers
        stated = run.profile.seen.layer_factors.get(layers[0], {}).get(layers[1], 1.0)
    else:
        stated = _field(run.model(kind), path)
    if stated is None or not (stated or unit):
        return None
    if path in ("kernels.products", "kernels.memory") or path.startswith("kernels.narrow"):
        most = max(LARGEST_PART, stated)
    elif path in PARTS:
        most = 1.0
    constant = Constant(kind, run.parts[kind], path, slack, most=most, layers=layers)
    return FreeFigure(constant, float(stated), unit * slack, 0.0, most)


def own_presets(fit: OwnFit, out: Path) -> list[Path]:
    """Write the fitted presets of each system to OUT/KIND/NAME.toml; returns the paths.

    A profile that had not been measured on a system of these runs afterwards counts as measured on
    theirs alone, because its figures were moved to them; another one on theirs in addition.
    """
    changes: dict[tuple[Kind, str], Changes] = {}
    for figure, shift in zip(fit.figures, fit.posterior.shifts, strict=True):
        own = changes.setdefault((figure.constant.kind, figure.constant.name), {})
        value = figure.value(shift)
        if figure.constant.layers:
            continue
        if figure.path == FACTOR or number(value) != number(figure.start):
            own[figure.path] = value
    for name in _profiles(fit.runs):
        own_runs = [run for run in fit.runs if run.parts["runtimes"] == name]
        factors = {
            run.job.cluster.name: float(changes["clusters", run.parts["clusters"]][FACTOR])
            for run in own_runs
            if run.job.cluster.name
        }
        layers = _layer_factors(fit, name)
        found = changes.get(("runtimes", name), {}) | _profile(own_runs, fit.spreads[name], factors, layers)
        changes["runtimes", name] = (
            _with_adapters(found, own_runs[0].profile) if _has_adapters(name, own_runs) else found
        )
    for run in fit.runs:
        if run.job.cluster.spread is not None and run.profile.runs.launched:
            spread = fit.spreads[run.parts["runtimes"]]
            changes["clusters", run.parts["clusters"]]["spread"] = spread
    return write_changed(fit.runs, changes, out)


def _has_adapters(profile: str, runs: Sequence[Run]) -> bool:
    """Whether adapters are trained in these runs, whose figures a profile has apart. Raises InputError where
    they are in some of them alone."""
    (first, *others) = {run.job.training.adapter is not None for run in runs}
    if others:
        message = f"runs with training.adapter and runs without it share the runtime {profile}"
        raise InputError.of("mixed-runs", "training.adapter", message, "calibrate each kind apart, with its own --out")
    return first


def _with_adapters(changes: Changes, profile: RuntimeProfile) -> Changes:
    """The same changes in a profile's table for jobs with adapters."""
    scale = float(changes.get("operators.passes", 1.0))
    passes = {f"{path}.{way}": get_value(profile, f"{path}.{way}") for path in PASSES for way in WAYS}
    scaled = {path: scale * value for path, value in passes.items() if scale != 1}
    own = {path: value for path, value in changes.items() if path != "operators.passes"} | scaled
    return {f"with_adapters.{path}": value for path, value in own.items()}


def _layer_factors(fit: OwnFit, profile: str) -> dict[str, dict[str, float]]:
    """The factors on layers that the runs of a profile found, by cluster and shape."""
    found: dict[str, dict[str, float]] = {}
    for constant, value in fit.values.items():
        if constant.layers and constant.name == profile:
            cluster, shape = constant.layers
            found.setdefault(cluster, {})[shape] = value
    return found


def _profile(
    runs: Sequence[Run], spread: float, factors: Mapping[str, float], layers: Mapping[str, Mapping[str, float]]
) -> Changes:
    """Return the changes to a profile: the runs behind it and its spread. factors: by cluster, for plans
    on copies without a factor; layers: by cluster and shape."""
    own, profile = seen_by(runs), runs[0].profile
    if not is_elsewhere(runs):
        own = merged_seen(profile.seen, own)
    known = profile.seen.layer_factors
    own = own.model_copy(
        update={
            "step_factors": {**own.step_factors, **factors},
            "layer_factors": {
                **own.layer_factors,
                **{name: {**known.get(name, {}), **found} for name, found in layers.items()},
            },
        }
    )
    changes: Changes = {"spread": spread, **seen_changes(own)}
    if any(run.layout.model.experts for run in runs):
        changes["experts.spread"] = spread
    return changes


def _field(model: object, path: str) -> float | None:
    """The figure at a dotted path; None where one on the way is absent."""
    if path == "operators.passes":
        return 1.0
    for name in path.split("."):
        model = getattr(model, name, None)
    return model if isinstance(model, int | float) else None
