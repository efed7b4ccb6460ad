"""`mpctl status`: what a run does at this moment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpctl.cli import complete

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run's directory, or its name in runs/.",
        autocompletion=complete.run,
    ),
]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


OtherOwnerOption = Annotated[
    bool, typer.Option("--allow-other-owner", help="Also where the run directory is not yours.")
]


@app.command()
def status(
    run: RunArgument, as_json: AsJsonOption = False, allow_other_owner: OtherOwnerOption = False
) -> None:
    """Show how far RUN is, the time left, its newest checkpoint and what every rank is doing.

    Status: submitted (waits for its scheduler), running, finished, stopped (on request), failed,
    interrupted (its launcher is gone and did not say how the run ended) or unreadable (job.json is
    damaged). The exit code is 0 for all of them.
    """
    from mpctl.runs.saved import require_own_run, short_name
    from mpctl.runs.status import status_document, status_of

    path = require_own_run(run, allow_other_owner=allow_other_owner)
    document = status_document(status_of(path, short_name(run)))
    if as_json:
        from mpctl.render.output import print_json

        print_json(document)
        return
    from mpctl.render.runs import print_status

    print_status(document)
