"""`mpctl bench`: measure this machine, how training scales on it, and the plan itself."""

from __future__ import annotations

import typer

from mpctl.cli.bench.collectives import collectives
from mpctl.cli.bench.kernels import kernels, tensor_modes
from mpctl.cli.bench.machine import machine
from mpctl.cli.bench.reports import compare, report, trace
from mpctl.cli.bench.scaling import scaling
from mpctl.cli.bench.verify import verify
from mpctl.cli.hints import HintingGroup
from mpctl.cli.own_help import OwnHelp

app = typer.Typer(cls=HintingGroup, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine, its links, scaling, plans against runs."""


app.command(cls=OwnHelp)(machine)
app.command(cls=OwnHelp)(scaling)
app.command(cls=OwnHelp)(collectives)
app.command(cls=OwnHelp)(verify)
app.command()(compare)
app.command()(trace)
app.command(rich_help_panel="More", cls=OwnHelp)(kernels)
app.command("tensor-modes", rich_help_panel="More", cls=OwnHelp)(tensor_modes)
app.command(rich_help_panel="More")(report)
