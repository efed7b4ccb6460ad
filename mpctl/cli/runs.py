"""`mpctl runs`: what has been trained here, how far each run came and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


FolderOption = Annotated[
    Path, typer.Argument(help="A folder with runs, or with folders of runs; or one run.")
]
SortOption = Annotated[
    str,
    typer.Option(
        help="Column to sort by: name, status, model, step, loss, validation_loss, "
        "tokens_per_second, started, ended or checkpoint_bytes."
    ),
]


@app.command()
def runs(
    folder: FolderOption = Path("runs"),
    sort: SortOption = "started",
    reverse: Annotated[bool, typer.Option("--reverse", help="Largest or latest first.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:
    """List the runs in FOLDER: status, step, losses, speed, layout, times, size of checkpoints.

    Status: submitted (waits for its scheduler), running, finished, stopped (on request), failed,
    interrupted (the launcher was killed or the machine went down) or unreadable (job.json is
    damaged).
    """
    from mpctl.render.output import print_json
    from mpctl.runs.listing import list_runs

    if as_json:
        print_json(list_runs(folder, sort=sort, reverse=reverse).as_dict())
        return
    from mpctl.render.progress import TaskBar
    from mpctl.render.runs import print_runs

    with TaskBar(after=1.0) as bar:
        listing = list_runs(folder, sort=sort, reverse=reverse,
                            on_progress=lambda done, total: bar.update("reading runs", done, total)
                            )  # fmt: skip
    print_runs(listing)
