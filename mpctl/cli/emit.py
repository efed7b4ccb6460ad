"""`mpctl emit`: a plan as settings of another launcher."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mpctl.cli.job_toml import job_toml
from mpctl.cli.options import AsJsonOption, JobSource, with_job
from mpctl.core.errors import DOES_NOT_FIT, InputError
from mpctl.interop.registry import TARGETS

if TYPE_CHECKING:
    from mpctl.plan.planning.plan import Plan

TOML: Final = "toml"
"""The target that is mpctl's own job file."""
TRAINED_TYPES = {f"training.{key}" for key in ("adapter.dtype", "gradient_dtype", "optimizer_dtype", "master_weights")}
"""Adapter settings that --from filled in for the launcher that was read; another launcher has its own."""
TRAINERS: Final = {"trl", "axolotl", "llama-factory"}
LauncherArgument = Annotated[
    str | None, typer.Argument(metavar="LAUNCHER", help=f"One of {', '.join((*TARGETS, TOML))}.", show_default=False)
]


@with_job(takes_words=True)
def emit(job: JobSource, launcher: LauncherArgument = None, as_json: AsJsonOption = False) -> None:
    """Print a plan as flags or config file of another launcher.

    Differences are comments in it. LAUNCHER toml writes the job itself, as a job file.

    mpctl emit job.toml megatron

    Exit codes: 0 the job fits, or that is not known; 2 bad input; 3 it does not fit.
    """
    words = job.with_words([launcher] if launcher else [])
    if not words and job.source is not None:  # the job comes from flags: `mpctl emit megatron --model gpt2`
        words = [job.source]
        job = job._replace(source=None)
    if len(words) != 1:
        raise InputError.of("usage", "LAUNCHER", "one launcher is needed", f"use one of {', '.join((*TARGETS, TOML))}")
    job = for_launcher(job, words[0])
    made = job.plan()
    made.require_legal()
    print_emitted(job, made, words[0], as_json=as_json)
    if made.fits is False:
        raise typer.Exit(DOES_NOT_FIT)


def for_launcher(job: JobSource, target: str) -> JobSource:
    """The job under the runtime of launcher `target`, if the user named none, or only --from did."""
    from mpctl.interop.emitted import launcher_runtime
    from mpctl.spec.load import load_partial

    if job.read and target not in (TOML, job.read[0]):
        left = _left(job, job.read[0], target)
        job = job._replace(overrides={key: v for key, v in job.overrides.items() if key in job.own or key not in left})
    if target == TOML or "training.runtime" in job.own:
        return job
    loaded = load_partial(job.source, job.overrides).job
    if loaded is None or not (job.read or loaded.training.is_runtime_default):
        return job
    return job.with_settings({"training.runtime": launcher_runtime(loaded, target)})


def _left(job: JobSource, read: str, target: str) -> Collection[str]:
    """Settings of launcher `read` that are left to launcher `target`."""
    from mpctl.spec.runtime import get_profile
    from mpctl.spec.training import DEFAULT_RUNTIME, LOSS_KEYS

    if {read, target} <= TRAINERS:
        return TRAINED_TYPES if "training.adapter.dtype" in job.others else ()
    runtime = job.overrides.get("training.runtime", DEFAULT_RUNTIME)
    return () if target in get_profile(runtime).runs.emit else LOSS_KEYS


def print_emitted(job: JobSource, made: Plan, target: str, *, as_json: bool) -> None:
    """Print a plan in the form of another launcher, or the job as a job file."""
    from mpctl import __version__
    from mpctl.interop.emitted import EmittedPlan, emit_plan
    from mpctl.render.output import print_json

    if target == TOML:
        line = " ".join(job.line("plan").split())
        text = job_toml(job.source, job.overrides, [line if len(line) < 200 else f"{line[:197]}..."])
        emitted = EmittedPlan(TOML, f"mpctl {__version__}", TOML, (), text.rstrip())
    else:
        emitted = emit_plan(made, target)
    if as_json:
        print_json(emitted.as_dict())
    else:
        print(emitted.body if target == TOML else emitted.text)
