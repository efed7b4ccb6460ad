"""The software that a layout could run under, and what the same layout costs under each.

A plan is made for one runtime. The default is mpctl's own, because that is what `mpctl launch`
starts: a default that depended on the device would plan one thing and launch another. A plan on
GPUs without a named runtime reports this, with the step time under the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from mpctl.core.errors import InputError
from mpctl.core.records import Json, to_json
from mpctl.core.units import seconds_text
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.plan.planning.summary import PlanSummary, plan_summary
from mpctl.plan.rules.runtime import not_run
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.presets import PresetFile, get_file, preset_files
from mpctl.spec.releases import preset_named
from mpctl.spec.runtime import RuntimeProfile, get_profile, is_same_software
from mpctl.spec.training import LOSS_KEYS

ALL = "all"
FIGURES = ("fits", "step_seconds", "step_seconds_low", "step_seconds_high", "mfu", "device_bytes")


class UnderRuntime(NamedTuple):
    """A layout under one runtime.

    runtime: its name; missing: in words, settings that it does not run, or why it refuses the job;
    plan: None where something is missing.
    """

    runtime: str
    profile: RuntimeProfile
    missing: tuple[str, ...]
    plan: Plan | None

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None where the layout does not run or cannot be timed."""
        return plan_summary(self.plan).step_seconds if self.plan else None

    @property
    def text(self) -> str:
        """`megatron-core 26.5 s`, also `(does not fit)`; `nanotron` where there is no time."""
        if self.plan is None or self.seconds is None:
            return self.runtime
        lacking = " (does not fit)" if self.plan.fits is False else ""
        return f"{self.runtime} {seconds_text(self.seconds)}{lacking}"

    def as_dict(self) -> Json:
        """The entry of `runtimes` in mpctl.plan/2. emit: launchers of `--emit` that run this
        software. If `missing` is not empty, every figure is None."""
        summary = to_json(plan_summary(self.plan) if self.plan else PlanSummary())
        return {
            "runtime": self.runtime,
            "software": self.profile.name,
            "emit": self.profile.runs.emit,
            "not_run": list(self.missing),
            **{key: summary[key] for key in FIGURES},
        }


def is_open(job: JobSpec) -> bool:
    """Whether the job is for GPUs and does not name the software that trains it."""
    return job.training.is_runtime_default and job.device_kind not in (None, "cpu")


def open_text(job: JobSpec) -> str:
    """The runtime that an answer for a job without a named one (`is_open`) assumes: `mpctl, as no
    --runtime was given; never measured on NVIDIA H100-SXM5-80GB`."""
    runtime, device = job.training.runtime, job.cluster.device
    text = f"{runtime}, as no --runtime was given"
    if device is None or job.cluster.spread or device.name in get_profile(runtime).seen.devices:
        return text
    return f"{text}; never measured on {device.name}"


def other_runtimes(job: JobSpec) -> list[str]:
    """The current runtimes that run on the job's devices, except the job's own: first those whose
    figures were measured on such a device."""
    today = runtimes_of_today(job.cluster, job.device_kind)
    return [name for name in today if name != job.training.runtime]


def runtimes_of_today(cluster: ClusterSpec, kind: str | None) -> list[str]:
    """The current runtimes that run on devices of a kind: first those whose figures were measured
    on the cluster's device."""
    device, rates = (cluster.device.name, cluster.device.peak_flops) if cluster.device else ("", None)
    files = preset_files("runtimes")
    current = (name for name, file in files.items() if _names_a_launcher(file))
    profiles = {
        name: profile
        for name, profile in _readable(current)
        if profile.runs.is_used_today and profile.runs.runs_on(kind) and profile.runs.is_for(rates)
    }
    return sorted(profiles, key=lambda name: (device not in profiles[name].seen.devices, name))


def _names_a_launcher(file: PresetFile) -> bool:
    """Whether the file can be of a current runtime; most are not, and need not be parsed."""
    try:
        content = file.content()
    except InputError:
        return False
    return b"launched" in content or b"emit" in content


def _readable(names: Iterable[str]) -> Iterator[tuple[str, RuntimeProfile]]:
    """The profiles of these names, skipping a user's files that are invalid: only a job that names
    such a file is refused."""
    for name in names:
        try:
            yield name, get_profile(name)
        except InputError:
            continue


def runtime_of(launcher: str, kind: str, dtypes: Collection[str] = ()) -> str | None:
    """The runtime whose figures are those of a launcher of `--emit` on devices of a kind that multiply these
    data types; None where no preset has them. Bundled presets come first, of them those for such devices alone."""
    files = preset_files("runtimes")
    found = [
        (not files[name].is_bundled, profile.runs.needs is None, name)
        for name, profile in _readable(files)
        if launcher in profile.runs.emit and profile.runs.runs_on(kind) and profile.runs.is_for(dtypes)
    ]
    return min(found)[-1] if found else None


def named_runtimes(text: str, job: JobSpec) -> list[str]:
    """The runtimes that `--runtimes` names: `megatron-core,megatron-bridge-26.06`, or with `all` the current
    ones that run on the job's devices. Raises InputError for an unknown name."""
    if text == ALL:
        return runtimes_of_today(job.cluster, job.device_kind)
    device = job.cluster.device
    names = (preset_named(name, device.peak_flops if device else None) for name in text.split(","))
    runtimes = list(dict.fromkeys(names))
    for name in runtimes:
        get_file("runtimes", name, where="--runtimes")
    return runtimes


def same_layout(plan: Plan, runtimes: Sequence[str], *, own_loss: bool = False) -> list[UnderRuntime]:
    """The layout of a legal plan under each of these runtimes. own_loss: other software computes its loss as it
    does by itself."""
    return [_under(plan, name, own_loss) for name in runtimes]


def _under(plan: Plan, runtime: str, own_loss: bool) -> UnderRuntime:
    profile = get_profile(runtime)
    if runtime == plan.job.training.runtime:
        return UnderRuntime(runtime, profile, (), plan)
    job = with_runtime(plan.job, runtime)
    if own_loss and not is_same_software(runtime, plan.job.training.runtime):
        own = dict.fromkeys(key.partition(".")[2] for key in LOSS_KEYS)
        job = job.model_copy(update={"training": job.training.model_copy(update=own)})
    if missing := tuple(text for _, text in not_run(job, profile)):
        return UnderRuntime(runtime, profile, missing, None)
    under = make_plan(job)
    refused = tuple(str(check.issue) for check in under.errors)
    return UnderRuntime(runtime, profile, refused, None if refused else under)


def with_runtime(job: JobSpec, runtime: str) -> JobSpec:
    """A complete job for another runtime, everything else unchanged."""
    training = job.training.model_copy(update={"runtime": runtime})
    return job.model_copy(update={"training": training})


def elsewhere_text(others: Iterable[UnderRuntime]) -> str:
    """`megatron-core 26.5 s, torchtitan 31.2 s; not run by nanotron`: the fastest first."""
    every = list(others)
    timed = sorted((other.seconds, other.text) for other in every if other.seconds is not None)
    rest = [other.runtime for other in every if other.plan is None]
    parts = [", ".join(text for _, text in timed)] if timed else []
    parts += [f"not run by {', '.join(rest)}"] if rest else []
    return "; ".join(parts)
