"""The options that say on which hosts a bench's ranks run, as `mpctl launch` has them.

In a world that another program started (torchrun, srun, mpirun, Kubeflow) every process runs the
command, and those after the first follow it. That is possible for a bench of one launch; a bench of
several layouts needs worlds of several sizes, and is refused there.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from mpctl.cli.launch import ExcludeOption, HostfileOption, IncludeOption, ssh_settings
from mpctl.cli.options import JobSource

OnOption = Annotated[
    Literal["auto", "local", "slurm", "ssh", "torchrun"] | None,
    typer.Option(
        help="Where ranks are started: on this host, on hosts of an allocation or a hostfile, in a "
        "world that another program started; by default as `mpctl launch` does.",
        show_default=False,
    ),
]
OPTIONS: dict[str, Any] = {
    "on": OnOption,
    "hostfile": HostfileOption,
    "include": IncludeOption,
    "exclude": ExcludeOption,
}
RANKS = "ranks-r1"
"""The run directory, in the bench's folder, of a bench of one launch."""
Command = Callable[..., None]
Join = Callable[[JobSource, str | None, dict[str, Any]], None]


def with_hosts(command: Command) -> Command:
    """Add --on, --hostfile, --include and --exclude to a command whose first parameter is its job;
    `with_job` goes around it. The job that the command receives has them as settings."""
    return _with_options(command, _refuse_world)


def with_joined_hosts(command: Command) -> Command:
    """The same for a bench of one launch in OUT/RANKS, which can run in a joined world; its options
    `out` and `dry_run` are those of options.py."""
    return _with_options(command, _follow)


def _with_options(command: Command, join: Join) -> Command:
    @wraps(command)
    def wrapper(job: JobSource, **values: Any) -> None:
        chosen = {name: values.pop(name) for name in OPTIONS}
        settings = {"launch.on": chosen["on"], **ssh_settings(**chosen)}
        job = job.with_settings(settings)
        join(job, job.overrides.get("launch.on"), values)
        command(job, **values)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in OPTIONS
    ]
    own = inspect.signature(command).parameters.values()
    wrapper.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    hints = get_type_hints(command, include_extras=True)
    wrapper.__annotations__ = {**hints, **OPTIONS}
    return wrapper


def _follow(job: JobSource, on: str | None, values: dict[str, Any]) -> None:
    """Follow the first process of a joined world; returns in that process, and in no world."""
    from mpctl.cli.launch_joined import follow_if_joined

    out: Path | None = values.get("out")
    run_dir = None if out is None else out / RANKS
    is_dry = bool(values.get("dry_run"))
    about = JobSource(job.source, _about_launch(job))
    follow_if_joined(about, run_dir, on, resume=False, is_dry=is_dry, named_by="--out")


def _refuse_world(job: JobSource, on: str | None, values: dict[str, Any]) -> None:
    """Raises InputError in the first process of a joined world; the others end. Returns in no
    world, and where the ranks are started otherwise."""
    from mpctl.clusters.joined.world import find_world
    from mpctl.errors import InputError
    from mpctl.spec.load import load_job

    world = find_world(os.environ)
    if on is None and world is not None:
        on = load_job(job.source, _about_launch(job)).launch.on
    if on not in (None, "auto", "torchrun") or (world is None and on != "torchrun"):
        return
    if world is not None and not world.is_first:
        raise typer.Exit(2)
    why = (
        "this bench launches layouts of several sizes, and a world that is started already has one"
    )
    hint = "use --on slurm in the allocation, or --on ssh with a hostfile; --on local for this host"
    raise InputError.of("bench-in-world", "--on", why, hint)


def _about_launch(job: JobSource) -> dict[str, Any]:
    """The settings of [launch] on the command line; a bench may take others that no job can have,
    such as several data types."""
    from mpctl.spec.names import full_name

    return {k: v for k, v in job.overrides.items() if full_name(k).startswith("launch.")}
