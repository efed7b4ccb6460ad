"""`mpctl emit`: a plan as settings of another launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli.options import AsJsonOption, FromOption, JobSource, read_from, with_job
from mpctl.core.errors import DOES_NOT_FIT, InputError
from mpctl.interop.registry import TARGETS

if TYPE_CHECKING:
    from mpctl.plan.planning.plan import Plan

LauncherArgument = Annotated[
    str | None, typer.Argument(metavar="LAUNCHER", help=f"One of {', '.join(TARGETS)}.", show_default=False)
]


@with_job
def emit(
    job: JobSource, launcher: LauncherArgument = None, from_: FromOption = None, as_json: AsJsonOption = False
) -> None:
    """Print a plan as flags or config file of another launcher.

    Differences are comments in it.

    mpctl emit job.toml megatron

    Exit codes: 0 the job fits, or that is not known; 2 bad input; 3 it does not fit.
    """
    is_read = from_ is not None and "training.runtime" not in job.overrides
    words = [launcher] if launcher else []
    if from_ is not None:
        job, words = read_from(job, from_, words)
    elif not words:  # the job comes from flags: `mpctl emit megatron --model gpt2`
        job, words = job.without_source(words)
    if len(words) != 1:
        raise InputError.of("usage", "LAUNCHER", "one launcher is needed", f"use one of {', '.join(TARGETS)}")
    made = for_launcher(job, words[0], is_read=is_read).plan()
    made.require_legal()
    print_emitted(made, words[0], as_json=as_json)
    if made.fits is False:
        raise typer.Exit(DOES_NOT_FIT)


def for_launcher(job: JobSource, target: str, *, is_read: bool) -> JobSource:
    """The job under the runtime of launcher `target`, if the user named none. is_read: the job's
    runtime comes from another launcher's flags, so the user did not name it."""
    from mpctl.interop.emitted import launcher_runtime
    from mpctl.spec.load import load_partial

    loaded = load_partial(job.source, job.overrides).job
    if loaded is None or not (is_read or loaded.training.is_runtime_default):
        return job
    return job.with_settings({"training.runtime": launcher_runtime(loaded, target)})


def print_emitted(made: Plan, target: str, *, as_json: bool) -> None:
    """Print a plan in the form of another launcher."""
    from mpctl.interop.emitted import emit_plan
    from mpctl.render.output import print_json

    emitted = emit_plan(made, target)
    if as_json:
        print_json(emitted.as_dict())
    else:
        print(emitted.text)
