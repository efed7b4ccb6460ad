"""A command line of mpctl run for an agent, as a process of its own.

A call that is cancelled ends its process; one that fails takes nothing else along. No shell reads the words, and what
an agent says is the value of an option or stands behind `--`, so that it never becomes an option itself.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import anyio
from mcp.server.mcpserver import Context

from mpctl.core.errors import DOES_NOT_FIT, InputError, Issue

ANSWERED = (0, DOES_NOT_FIT)
TICK = 1.0  # seconds between two reports of progress


class Calls:
    """Runs commands, at most one a core at a time."""

    def __init__(self) -> None:
        self._slots = anyio.CapacityLimiter(os.cpu_count() or 1)

    async def run(self, words: Sequence[str], ctx: Context[Any, Any], *, text: str = "") -> dict[str, Any]:
        """The JSON document that `mpctl WORDS` prints, under its `command` and exit code, that of a run that failed
        too. text: its standard input.

        Raises InputError with every issue of refused input, and with the last lines of stderr for other failures."""
        line = shlex.join(["mpctl", *words])
        async with anyio.create_task_group() as tasks, self._slots:
            tasks.start_soon(_tick, ctx, line)
            done = await anyio.run_process(
                [sys.executable, "-m", "mpctl", *words], input=text.encode(), check=False, start_new_session=True
            )
            tasks.cancel_scope.cancel()
        out, err = (each.decode("utf-8", "replace") for each in (done.stdout, done.stderr))
        try:
            document = json.loads(out)
        except ValueError:
            message = f"ended with exit code {done.returncode}: {(err or out)[-2000:]}"
            raise InputError.of("command-failed", line, message) from None
        if done.returncode not in ANSWERED and "issues" in document:
            raise InputError([Issue(**issue) for issue in document["issues"]])
        return {"command": line, "exit_code": done.returncode, "document": document}


async def _tick(ctx: Context[Any, Any], line: str) -> None:
    """Report the seconds that a call has taken."""
    began = time.monotonic()
    while True:
        await anyio.sleep(TICK)
        await ctx.report_progress(round(time.monotonic() - began, 1), None, f"{line.split()[1]} is running")
