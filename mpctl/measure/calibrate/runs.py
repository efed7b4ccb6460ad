"""Measured runs, and the constants of presets that can be fitted to them.

A constant is one figure of a device's kernels, of a cluster's links or of a runtime profile; never
of a model or of a run. The presets that jobs name determine which runs depend on it. Each constant
has a prior, the value in its preset, and a `slack`: a standard deviation of the prior.

Run directories are read without changing them. A path is a run directory, a file in one, or a
folder with runs at any depth below it, such as that of a bench. A run is the job of its job.json
and the median step time of its metrics.jsonl after the warm-up, as its summary.json has it; where
only the summary exists, the summary's. The job.json holds the figures of a cluster and not the name
of its preset: a fit needs the preset, by default the one with the cluster's name. The numbers of
nodes and devices and the headroom stay those of the run's cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import log
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from mpctl.core.errors import InputError, Issue, attempt
from mpctl.core.units import seconds_text
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.topology import find_topology
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.estimate.network import MissingLink
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.estimate.system import System, layer_shape
from mpctl.plan.estimate.time import find_step_time, step_time_model
from mpctl.plan.rules.validate import check_job
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.summary import training_progress
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.load import job_from_raw, read_source
from mpctl.spec.presets import find_preset, lasting_name, preset_names, search_path
from mpctl.spec.runtime import RuntimeProfile

Kind = Literal["devices", "clusters", "runtimes"]
PASSES = tuple(f"operators.{name}" for name in ("hidden", "width", "inner", "scores", "logits"))
WAYS = ("forward", "backward")  # of a single layer whose kernels were timed
MEASURED = (("step_seconds",), tuple(f"layer_{way}_ms" for way in WAYS))  # a run has either
LARGEST_PART, UNBOUNDED = 0.95, 1e12
MOST_SECONDS = 1e9
FARTHEST = 100.0  # a measured step from its plan, as a factor; ms taken for s are 1000
LAYERS = "seen.layer_factors"
SHARES = (
    "kernels.flash",
    "kernels.flash_backward",
    "kernels.misaligned",
    "kernels.unaligned",
    "intra_node.efficiency",
    "inter_node.efficiency",
    "inter_node.decay",
    "overlap.tp",
    "overlap.pp",
    "overlap.dp",
    "overlap.zero",
    "overlap.products",
    "overlap.cp",
)


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that a fit may change: `path` (dotted) in presets/KIND/NAME.toml.

    slack: how far it may be from its prior, in the logarithm. tied: further presets that share the
    value. most: its upper bound. layers: of the path LAYERS, the cluster and the shape of layers
    that the factor is of.
    """

    kind: Kind
    name: str
    path: str
    slack: float
    tied: tuple[str, ...] = ()
    most: float = UNBOUNDED
    layers: tuple[str, str] | None = None

    @property
    def key(self) -> str:
        """The constant's name in files of priors, such as `runtimes/mpctl:overlap.dp`."""
        return f"{self.kind}/{self.name}:{'.'.join((self.path, *(self.layers or ())))}"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.tied)


@dataclass(frozen=True)
class Run:
    """A measured run, ready to be estimated.

    group: the table from which it comes. parts: for each kind of preset, the name of the one that
    it uses. measured: `step_seconds`, or `layer_forward_ms` and `layer_backward_ms`.
    """

    id: str
    group: str
    layout: JobLayout
    profile: RuntimeProfile
    parts: Mapping[Kind, str]
    measured: Mapping[str, float]

    @property
    def job(self) -> JobSpec:
        return self.layout.job

    def has(self, constant: Constant) -> bool:
        """Whether the run depends on the constant: it uses a preset that has it."""
        is_of = constant.layers in (None, self.layers)
        return is_of and self.parts[constant.kind] in constant.names

    @property
    def layers(self) -> tuple[str, str]:
        """Its cluster's name, and the shape of its layers on a rank."""
        return self.job.cluster.name or "", layer_shape(self.job)

    def estimate(self, job: JobSpec | None = None, profile: RuntimeProfile | None = None) -> StepTime:
        """The estimated time of a step. Raises InputError where no time can be estimated.

        job, profile: those to estimate with instead of the run's.
        """
        layout = replace(self.layout, job=job) if job else self.layout
        time = find_step_time(layout, profile or self.profile)
        if isinstance(time, str):
            raise InputError.of("not-estimated", self.id, time)
        return time

    def model(self, kind: Kind) -> BaseModel | None:
        """The preset of this kind that the run uses, as a model."""
        return {"devices": self.job.cluster.device, "clusters": self.job.cluster, "runtimes": self.profile}[kind]

    def residuals(self, values: Mapping[Constant, float]) -> list[float]:
        """log(estimated / measured), with these values instead of those of the presets.

        One number for a step, two (forward, backward) for a single layer.
        """
        changed = self.under(values)
        return changed._compare(changed.layout, changed.profile)

    def under(self, values: Mapping[Constant, float]) -> Run:
        """The run with these values in its presets."""
        cluster, profile = with_values(self.job.cluster, self.profile, values)
        return replace(self, layout=self.layout.with_cluster(cluster), profile=profile)

    def _compare(self, layout: JobLayout, profile: RuntimeProfile) -> list[float]:
        try:
            factor = layout.job.cluster.step_factor or 1.0  # a run that ran is of a known system
            time_model = step_time_model(layout, profile, System(factor=factor))
            if "step_seconds" in self.measured:
                return [log(time_model.seconds / self.measured["step_seconds"])]
            chunk = time_model.layer()
        except (MissingFigure, MissingLink) as missing:
            raise InputError.of("not-estimated", self.id, str(missing)) from None
        measured = (self.measured[f"layer_{way}_ms"] / 1e3 for way in WAYS)
        return [log(a / b) for a, b in zip((chunk.forward, chunk.backward), measured, strict=True)]


def read_runs(rows: Iterable[Mapping[str, Any]]) -> list[Run]:
    """Runs from parsed rows with the keys `id`, `group`, `job` (presets by name) and `measured`.

    Raises InputError for a row that is not a run.
    """
    return [_read(row, number) for number, row in enumerate(rows)]


def usable_runs(rows: Iterable[Mapping[str, Any]], unread: Sequence[Issue] = ()) -> tuple[list[Run], list[Issue]]:
    """The runs that can be planned and timed, and the reasons why the others cannot. Rules that a
    setting can switch off refuse no run, as the run was made.

    unread: issues of measurements of which there is no row. Raises InputError with all reasons,
    these included, where no run is left.
    """
    runs: list[Run] = []
    issues: list[Issue] = []
    for number, row in enumerate(rows):
        reasons: list[Issue] = []
        run = attempt(reasons, partial(_read_usable, row, number))
        runs += [run] if run else []
        name = _name(row, number)
        for reason in reasons:
            where = name if reason.where == name else f"{name}: {reason.where}"
            issues.append(reason._replace(where=where))
    if not runs:
        raise InputError([*unread, *issues])
    return runs, issues


def _read_usable(row: Mapping[str, Any], number: int) -> Run:
    run = _read(row, number, is_checked=True)
    run.residuals({})
    if "step_seconds" in run.measured:
        require_possible(run.id, run.estimate(), run.measured["step_seconds"], run.job.device_kind)
    return run


def require_possible(where: str, planned: StepTime, measured: float, device_kind: str | None) -> None:
    """Raises InputError where a step is FARTHEST times longer or shorter than planned, or shorter
    than its model's FLOP at the peak of an accelerator: of another job, or in another unit."""
    ratio = planned.total / measured
    if not 1 / FARTHEST < ratio < FARTHEST:
        found = f"the plan is {seconds_text(planned.total)}"
    elif planned.mfu * ratio > 1 and device_kind != "cpu":
        found = f"at the device's peak FLOP/s it takes {seconds_text(planned.mfu * planned.total)}"
    else:
        return
    message = f"a step of {seconds_text(measured)}, and {found}"
    hint = "check that the job (model, batch, ranks, dtype) is that of this run, and its time in s"
    raise InputError.of("impossible-run", where, message, hint)


def _name(row: Any, number: int) -> str:
    return str(row.get("id", number) if isinstance(row, Mapping) else number)


def _read(row: Mapping[str, Any], number: int, *, is_checked: bool = False) -> Run:
    """is_checked: refuse a job that breaks a rule, before anything is computed of it."""
    name = _name(row, number)
    try:
        cluster, measured = row["job"]["cluster"], dict(row["measured"])
        cluster = cluster if isinstance(cluster, str) else str(cluster["preset"])
    except (KeyError, TypeError, ValueError):
        raise _not_a_run(name) from None
    if not any(all(map(_is_time, map(measured.get, keys))) for keys in MEASURED):
        raise _not_a_run(name)
    job = job_from_raw(row["job"], {})
    if is_checked:
        parallel = job.parallel.model_copy(update={"allow_tp_across_nodes": True})
        checks = check_job(job.model_copy(update={"parallel": parallel}))
        if errors := [check.issue for check in checks if check.status == "error"]:
            raise InputError(errors)
    if job.model is None or find_topology(job) is None:
        raise InputError.of("not-a-run", name, "it has no model, or no layout")
    layout = JobLayout.of(job)
    return Run(
        name,
        str(row.get("group", "")),
        layout,
        layout.profile,
        {"devices": device_preset(cluster), "clusters": cluster, "runtimes": job.training.runtime},
        measured,
    )


def device_preset(cluster: str) -> str:
    """The device preset of a cluster's preset: its own, or that of the preset that it starts from.
    Both are names or paths. Raises InputError where the cluster states a device's figures itself,
    since there is no preset to fit."""
    table = find_preset("clusters", cluster) or {}
    device, base = table.get("device"), table.get("preset")
    named = device.get("preset") if isinstance(device, dict) else device
    if isinstance(named, str):
        return named
    if device is None and isinstance(base, str):
        return device_preset(base)
    message = "it names no device preset that can be fitted"
    hint = 'put its device into a file, and name it: device = "./mine.toml"'
    raise InputError.of("no-device-preset", cluster, message, hint)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < MOST_SECONDS


def _not_a_run(name: str) -> InputError:
    return InputError.of(
        "not-a-run",
        name,
        "a run has job.cluster (a preset) and measured.step_seconds, or measured.layer_forward_ms "
        "and layer_backward_ms, above 0",
        'write {"job": {"cluster": "NAME or FILE", "model": ..., "training": {"runtime": ...}}, '
        '"measured": {"step_seconds": 1.25}}',
    )


def with_values(
    cluster: ClusterSpec, profile: RuntimeProfile, values: Mapping[Constant, float]
) -> tuple[ClusterSpec, RuntimeProfile]:
    """The cluster, with its device, and the profile with these values."""
    device = cluster.device
    for constant, value in values.items():
        if constant.kind == "devices":
            device = with_value(device, constant.path, value)
        elif constant.kind == "clusters":
            cluster = with_value(cluster, constant.path, value)
        else:
            profile = (
                _with_layers(profile, *constant.layers, value)
                if constant.layers
                else with_value(profile, constant.path, value)
            )
    return cluster.model_copy(update={"device": device}), profile


def _with_layers(profile: RuntimeProfile, cluster: str, shape: str, value: float) -> RuntimeProfile:
    known = profile.seen.layer_factors
    factors = {**known, cluster: {**known.get(cluster, {}), shape: value}}
    seen = profile.seen.model_copy(update={"layer_factors": factors})
    return profile.model_copy(update={"seen": seen})


def with_value(model: Any, path: str, value: float) -> Any:
    """A copy of the model with `value` at a dotted path.

    The path `operators.passes` multiplies all passes over memory by `value`.
    """
    if path == "operators.passes":
        return _scaled(model, value)
    first, _, rest = path.partition(".")
    changed = with_value(getattr(model, first), rest, value) if rest else value
    return model.model_copy(update={first: changed})


def _scaled(profile: RuntimeProfile, factor: float) -> RuntimeProfile:
    operators = profile.operators
    scaled = {
        name: passes.model_copy(update={"forward": passes.forward * factor, "backward": passes.backward * factor})
        for name in (path.removeprefix("operators.") for path in PASSES)
        for passes in (getattr(operators, name),)
    }
    return profile.model_copy(update={"operators": operators.model_copy(update=scaled)})


def get_value(model: Any, path: str) -> float:
    """The value at a dotted path of a preset's model; 0 if there is none."""
    if path == "operators.passes":
        return 1.0
    for name in path.split("."):
        model = getattr(model, name, None)
    return float(model or 0.0)


Row = dict[str, Any]
RUN_FILES = ("job.json", "metrics.jsonl", "summary.json")
OWN = ("nodes", "gpus_per_node", "headroom")  # taken from a run's cluster instead of its preset
DEEPEST = 3  # levels of folders below a path that are searched for runs


def is_run_path(path: Path) -> bool:
    """Whether a path is a folder, or a file of a run directory, rather than a list of runs."""
    return path.is_dir() or path.name in RUN_FILES


def run_rows(paths: Iterable[Path], cluster: str | None = None) -> tuple[list[Row], list[Issue]]:
    """The runs at these paths, as rows that `read_runs` takes, each run once, and issues: paths
    without a run, runs without a step, and runs with a cluster whose name no preset has.

    cluster: the preset of all runs, by name or path.
    """
    rows: list[Row] = []
    issues: list[Issue] = []
    folders: dict[Path, None] = {}
    for path in paths:
        found = list(find_runs(path))
        folders.update(dict.fromkeys(found))
        if not found:
            issues.append(
                Issue(
                    "bad-runs",
                    str(path),
                    "no run directory lies there",
                    "name the folder of a run, or of a bench that ran it",
                )
            )
    for folder in folders:
        row = attempt(issues, partial(_row, folder, cluster))
        if row is not None:
            rows.append(row)
    return rows, issues


def find_runs(path: Path) -> Iterator[Path]:
    """The run directories at or below a path, sorted by name, without those of ranks that measured
    kernels or collectives and trained nothing."""
    folder = path.parent if path.name in RUN_FILES else path
    yield from _runs_below(folder, DEEPEST)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "job.json").is_file():
        if not RunDir(folder).bench.exists():
            yield folder
    elif depth and folder.is_dir():
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.is_symlink():
                yield from _runs_below(inner, depth - 1)


def _row(folder: Path, cluster: str | None) -> Row:
    run = RunDir(folder)
    raw = read_source(str(run.job))
    own = raw.get("cluster")
    own = own if isinstance(own, dict) else {}
    preset = cluster or preset_of_cluster(own, where=str(run.job))
    _require_kind(own, preset, str(run.job))
    kept = {key: own[key] for key in OWN if own.get(key) is not None}
    return {
        "id": str(folder),
        "group": folder.resolve().parent.name,
        "job": {**raw, "cluster": {**kept, "preset": lasting_name("clusters", preset)}},
        "measured": {"step_seconds": measured_step(run)},
    }


def _require_kind(own: Mapping[str, Any], preset: str, where: str) -> None:
    """Raises InputError where a run's device is of another kind than the preset's: a run on CPU
    cores says nothing of an A100."""
    device = own.get("device")
    ran = device.get("kind") if isinstance(device, dict) else None
    if ran is None or find_preset("clusters", preset) is None:
        return  # the latter is refused where the row is read
    kind = (find_preset("devices", device_preset(preset)) or {}).get("kind")
    if kind and ran != kind:
        message = f"it ran on {ran}, and the devices of {preset} are {kind}"
        raise InputError.of("other-device", where, message, "name the cluster that it ran on")


def measured_step(run: RunDir) -> float:
    """Seconds of a step of the run, the median after the warm-up. Raises InputError where no step
    of it was recorded."""
    seconds = training_progress(list(run.records()))["step_seconds"] or _summary_step(run)
    if not seconds:
        raise InputError.of(
            "no-steps", str(run.path), "no step of the run was recorded", "leave it out, or run it again"
        )
    return seconds


def _summary_step(run: RunDir) -> float | None:
    try:
        seconds = json.loads(run.summary.read_text("utf-8"))["step_seconds"]
        return float(seconds) if seconds is not None and float(seconds) > 0 else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def preset_of_cluster(cluster: Mapping[str, Any], *, where: str) -> str:
    """The name of the preset with this cluster's name. Raises InputError, at `where`, where there
    is none."""
    if isinstance(preset := cluster.get("preset"), str):
        return preset
    named = _presets_by_title(search_path())
    if (title := str(cluster.get("name"))) in named:
        return named[title]
    what = f"is called {title!r}" if cluster.get("name") else "is meant: its cluster has no name"
    hint = "name the preset that the runs were made on: --cluster NAME or FILE"
    raise InputError.of("unknown-cluster", where, f"no cluster preset {what}", hint)


@cache
def _presets_by_title(search_path: tuple[str, ...]) -> Mapping[str, str]:
    """Names of cluster presets by the `name` in them, read once for each place of presets."""
    tables = {name: find_preset("clusters", name) or {} for name in preset_names("clusters")}
    return {str(table["name"]): name for name, table in tables.items() if "name" in table}
