"""The options that say on which hosts a bench's ranks run, as `mpctl launch` has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Literal, get_type_hints

import typer

from mpctl.cli.launch import ExcludeOption, HostfileOption, IncludeOption, ssh_settings
from mpctl.cli.options import JobSource

OnOption = Annotated[
    Literal["auto", "local", "slurm", "ssh"] | None,
    typer.Option(
        help="Where ranks are started: on this host, or on hosts of an allocation or a hostfile; "
        "by default as `mpctl launch` does.",
        show_default=False,
    ),
]
OPTIONS: dict[str, Any] = {
    "on": OnOption,
    "hostfile": HostfileOption,
    "include": IncludeOption,
    "exclude": ExcludeOption,
}


def with_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Add --on, --hostfile, --include and --exclude to a command whose first parameter is its job;
    `with_job` goes around it. The job that the command receives has them as settings."""

    @wraps(command)
    def wrapper(job: JobSource, **values: Any) -> None:
        chosen = {name: values.pop(name) for name in OPTIONS}
        settings = {"launch.on": chosen["on"], **ssh_settings(**chosen)}
        command(job.with_settings(settings), **values)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in OPTIONS
    ]
    own = inspect.signature(command).parameters.values()
    wrapper.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    hints = get_type_hints(command, include_extras=True)
    wrapper.__annotations__ = {**hints, **OPTIONS}
    return wrapper
