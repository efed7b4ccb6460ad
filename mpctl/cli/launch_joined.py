"""`mpctl launch` in a process of a world that another program started, other than its first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mpctl.cli.options import JobSource

if TYPE_CHECKING:
    from mpctl.clusters.joined.world import JoinedWorld
    from mpctl.planning.plan import Plan
    from mpctl.rundir.directory import RunDir
    from mpctl.spec.launch import LaunchSpec


def follow_if_joined(
    job: JobSource,
    run_dir: Path | None,
    on: str | None,
    *,
    resume: bool,
    is_dry: bool,
    is_trusted: bool = False,
    named_by: str = "--run-dir",
) -> None:
    """Follow the world's first process, and exit when its launch is over.

    Returns where this process is the first one, is part of no world, or is to launch by another
    backend. on: of the command line. is_dry: nothing is started, so there is nothing to follow.
    is_trusted: the run directory may belong to another user, which is refused otherwise, in a world
    or not. named_by: the option that says where the run directory is.
    """
    from mpctl.clusters.joined.world import find_world, require_world
    from mpctl.rundir.marker import require_own

    if run_dir is not None and not is_trusted:
        require_own(run_dir)
    if on not in (None, "auto", "torchrun"):
        return
    world = require_world(os.environ) if on == "torchrun" else find_world(os.environ)
    if world is None:
        return
    launch = _settings(job, run_dir, world, resume=resume)
    if launch.on not in ("auto", "torchrun"):
        return
    _require_run_dir(run_dir, world, named_by)
    if run_dir is not None:
        _end_if_restarted(run_dir)
    if world.is_first:
        return
    if run_dir is not None and not is_dry:
        from mpctl.clusters.joined.agent import follow_launcher
        from mpctl.rundir.directory import RunDir

        follow_launcher(RunDir(run_dir), world, launch.start_seconds)
    raise typer.Exit


def _settings(
    job: JobSource, run_dir: Path | None, world: JoinedWorld, *, resume: bool
) -> LaunchSpec:
    """The table [launch] of the job. Bad input is reported by the first process of the world, and
    on other nodes by the first one there, which may see other files."""
    from mpctl.errors import InputError
    from mpctl.rundir.directory import RunDir
    from mpctl.spec.load import load_job

    source = job.source
    if source is None and resume and run_dir is not None:
        source = str(RunDir(run_dir).document("job.json"))
    try:
        return load_job(source, job.overrides).launch
    except InputError:
        if world.is_first or (world.local == 0 and world.node > 0):
            raise
        raise typer.Exit(2) from None


def _end_if_restarted(run_dir: Path) -> None:
    """Let a pod succeed that was started again after its launch had ended: the launch itself has
    said how it ended, and nothing is left to do."""
    from mpctl.clusters.kubernetes.restarted import ended_launch
    from mpctl.render.output import print_warnings
    from mpctl.rundir.directory import RunDir

    if ended := ended_launch(RunDir(run_dir), os.environ):
        print_warnings([ended])
        raise typer.Exit


def _require_run_dir(run_dir: Path | None, world: JoinedWorld, named_by: str) -> None:
    """Processes find each other in the run directory, so that all of them have to know it."""
    from mpctl.errors import InputError

    if run_dir is not None:
        return
    if not world.is_first:
        raise typer.Exit(2)
    raise InputError.of(
        "no-run-dir",
        named_by,
        f"the {world.size} processes that {world.starter} started find each other in the run "
        "directory, and none is named",
        f"add {named_by} with a folder that all hosts share, the same for every process",
    )


def dismiss_followers(plan: Plan, run: RunDir) -> None:
    """Tell the other processes of a joined world that there is nothing to do; they wait for it."""
    from mpctl.clusters.registry import chosen_name, find_backend
    from mpctl.render.output import print_warnings

    if chosen_name(plan.job, os.environ) != "torchrun":
        return
    with find_backend(plan.job, os.environ).connect(
        plan, run, lambda message: print_warnings([message])
    ):
        pass  # they are told when the connection is closed
