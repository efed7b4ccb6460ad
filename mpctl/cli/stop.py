"""`mpctl stop`: ask a run to finish its step, save and end."""

from __future__ import annotations

from typing import Annotated

import typer

from mpctl.cli.status import OtherOwnerOption, RunArgument

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


NowOption = Annotated[
    bool, typer.Option("--now", help="End the ranks at once; steps since the last checkpoint go.")
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", min=0, show_default=False,
        help="Wait no longer than this for the end; the request stays. By default until the end.",
    ),
]  # fmt: skip
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.command()
def stop(
    run: RunArgument,
    now: NowOption = False,
    timeout: TimeoutOption = None,
    as_json: AsJsonOption = False,
    allow_other_owner: OtherOwnerOption = False,
) -> None:
    """Ask RUN to finish its step, save a checkpoint and end; wait for that and say what was saved.

    Works from any host that shares the run's directory. Exit code: 0 when the run has finished or
    was stopped in order, also before; 1 when it failed, was interrupted, or goes on after the
    --timeout.
    """
    from mpctl.render.runs import StopView, print_stopped
    from mpctl.runs.saved import require_own_run, short_name
    from mpctl.runs.stop import stop_run

    path = require_own_run(run, allow_other_owner=allow_other_owner)
    with StopView(short_name(run)) as view:
        stopped = stop_run(path, short_name(run), now=now, timeout=timeout, on_wait=view.update)
    if as_json:
        from mpctl.render.output import print_json

        print_json(stopped.as_dict())
    else:
        print_stopped(stopped, now=now)
    raise typer.Exit(0 if stopped.is_in_order else 1)
