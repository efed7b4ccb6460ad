"""`mpctl runs`: what has been trained here, how far it came and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(help="Where to look, one folder deep as well; or one run.")
    ] = Path("runs"),
    sort: Annotated[
        str,
        typer.Option(help="A column to sort by: name, status, model, step, loss, validation_loss, "
                     "tokens_per_second, started, ended or checkpoint_bytes."),
    ] = "started",
    reverse: Annotated[bool, typer.Option("--reverse", help="The largest or last first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:  # fmt: skip
    """List the runs in FOLDER: status, step, losses, speed, layout, times, size of checkpoints.

    Status: running, finished, stopped (asked to), failed, interrupted (the launcher ended without
    a word: killed, or the machine went down) or unreadable (job.json is damaged).
    """
    from mpctl.render.json import print_json
    from mpctl.runs.listing import list_runs

    if as_json:
        print_json(list_runs(folder, sort=sort, reverse=reverse).as_dict())
        return
    from mpctl.render.runs import print_runs
    from mpctl.render.tasks import TaskBar

    with TaskBar(after=1.0) as bar:
        listing = list_runs(folder, sort=sort, reverse=reverse,
                            on_progress=lambda done, total: bar.update("reading runs", done, total)
                            )  # fmt: skip
    print_runs(listing)
