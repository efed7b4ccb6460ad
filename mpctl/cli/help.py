"""`mpctl help`, and the --help of commands: their own options, not the thirty of a job each time.

`mpctl help job` shows the options of a job, `mpctl help COMMAND --full` every option of a command.
"""

from __future__ import annotations

import inspect
from copy import copy
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from mpctl.core.errors import InputError

JOB = "Job"
JOB_RARE = "Job, rarely used"
RARE = "Rarely used"
"""Panels of options that --help leaves out. JOB and JOB_RARE: settings of the job, which many commands take."""
FULL = "mpctl.full"  # a key of the context: nothing is left out


class OwnHelp(TyperCommand):
    """A command whose --help shows its own options, and says where the others are."""

    left_out: ClassVar[frozenset[str]] = frozenset({JOB, JOB_RARE, RARE})
    rare: ClassVar[str] = RARE

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help without the panels `left_out`."""
        shown = copy(self)
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        shown.help = "\n\n".join(p if "\b" in p else " ".join(p.split()) for p in paragraphs)
        if not ctx.meta.get(FULL):
            panels = {p: getattr(p, "rich_help_panel", None) for p in self.params}
            shown.params = [p for p, panel in panels.items() if panel not in self.left_out]
            lines = []
            if JOB in self.left_out & {*panels.values()}:
                lines.append("And the job's options (--model, --tp, --set, ...): mpctl help job")
            if rare := [p.opts[0] for p, panel in panels.items() if panel == self.rare]:
                topic = ctx.command_path.partition(" ")[2].replace("COMMAND", "job")
                lines.append(f"Rarely used: {', '.join(rare)} (mpctl help {topic} --full)")
            shown.epilog = "\n\n".join(lines)
        TyperCommand.format_help(shown, ctx, formatter)


class JobHelp(OwnHelp):
    """The options of a job."""

    left_out: ClassVar[frozenset[str]] = frozenset({JOB_RARE})
    rare: ClassVar[str] = JOB_RARE


def help_(
    ctx: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]", show_default=False)] = None,
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
    from mpctl.cli.options import describe_job, with_job

    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command(cls=JobHelp)(with_job(describe_job))
    return typer.main.get_command(alone)
