"""`mpctl mcp`: the planner as a server of the Model Context Protocol, on standard input and output.

calls.py   a command line, run as a process of its own; what it says, as one result
pages.py   results that are too long for one answer, by page
strict.py  unknown arguments are refused
tools.py   the tools: arguments of an agent -> words of a command
"""

from __future__ import annotations

from typing import Annotated

import typer

from mpctl.core.errors import InputError


def mcp(
    allow_launch: Annotated[
        bool, typer.Option("--allow-launch", help="Offer the tool launch too, which trains on this machine.")
    ] = False,
) -> None:
    """Serve plans to coding agents over the Model Context Protocol (stdio).

    Tools: plan, search, fit, explain, compare, why, from_flags, emit, presets, schema. They read and write nothing.
    Each result is the JSON of a command of mpctl with that command's line. Needs the extra `mcp`.

    claude mcp add mpctl -- mpctl mcp
    """
    try:
        from mpctl.cli.mcp.tools import server
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "mcp":
            raise
        hint = "pip install 'mpctl[mcp]'"
        raise InputError.of("extra-missing", "mcp", "the Model Context Protocol's SDK is not installed", hint) from None
    server(allow_launch=allow_launch).run()
