"""The --help of commands: their own options, not the thirty of a job each time, nor those rarely used."""

from __future__ import annotations

import inspect
from copy import copy
from typing import Any, ClassVar

from typer.core import TyperCommand

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
        shown.help = "\n\n".join(p if p.startswith("mpctl ") else " ".join(p.split()) for p in paragraphs)
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
