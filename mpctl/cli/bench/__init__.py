"""`mpctl bench`: measure this machine, how training scales on it, and the plan itself."""

from __future__ import annotations

import typer

from mpctl.cli.bench.collectives import collectives
from mpctl.cli.bench.compare import compare
<<<<<<< HEAD
from mpctl.cli.bench.report import report
=======
from mpctl.cli.bench.kernels import kernels
>>>>>>> e3d2d41 (mpctl bench kernels: what the planner's kernels take on this machine)
from mpctl.cli.bench.scaling import scaling
from mpctl.cli.bench.tensor_modes import tensor_modes
from mpctl.cli.bench.verify import verify
from mpctl.cli.hints import HintingGroup

app = typer.Typer(
    cls=HintingGroup, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True
)


@app.callback()
def bench() -> None:
<<<<<<< HEAD
    """Measure: scaling by training runs, collectives along axes, tensor modes by one layer, the
    plan by runs."""


app.command()(scaling)
app.command()(collectives)
=======
    """Measure: scaling and the plan by training runs, kernels, tensor modes by one layer."""


app.command()(scaling)
app.command()(kernels)
>>>>>>> e3d2d41 (mpctl bench kernels: what the planner's kernels take on this machine)
app.command("tensor-modes")(tensor_modes)
app.command()(verify)
app.command()(report)
app.command()(compare)
