"""`mpctl help COMMAND`: its --help, with --full all of its options; `mpctl help job`: the options of a job."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mpctl.cli.options import describe_job, with_job
from mpctl.cli.own_help import FULL, JobHelp
from mpctl.core.errors import InputError


def help_(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="A command, or `job`.", show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Also show options that are rarely used.")] = False,
) -> None:
    """Show the options of a command, or with `job` those of a job."""
    found, context = ctx.find_root().command, ctx.find_root()
    for word in command or []:
        name, found = ("COMMAND", _job_topic()) if word == "job" else _found(found, context, word)
        context = typer.Context(found, info_name=name, parent=context)
    context.meta[FULL] = full
    typer.echo(found.get_help(context))


def _found(group: Any, context: Any, word: str) -> tuple[str, Any]:
    """A command of a group by its name. Raises InputError when there is none."""
    if not hasattr(group, "resolve_command"):
        command = context.command_path
        raise InputError.of("unknown-command", command, f"there is no command {word!r}", f"use {command} --help")
    name, found, _ = group.resolve_command(context, [word])
    return name, found


def _job_topic() -> Any:
    """A command that has the options of a job, and no other."""
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command(cls=JobHelp)(with_job(describe_job))
    return typer.main.get_command(alone)
