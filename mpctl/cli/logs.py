"""`mpctl logs`: what the ranks of a run printed, as one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpctl.cli.status import RunArgument

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
LINES = 100


RankOption = Annotated[
    list[int] | None,
    typer.Option(metavar="N", min=0, help="Only this rank; repeatable. All ranks by default."),
]
LinesOption = Annotated[
    int, typer.Option("--lines", "-n", metavar="N", min=0, help="Show the last N lines.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Show all lines.")]
FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on with new lines until the run ends.")
]
EachOption = Annotated[bool, typer.Option("--each", help="Show each rank's log below the other's.")]
LauncherOption = Annotated[
    bool, typer.Option("--launcher", help="Show the logs of the launcher, torchrun and the nodes.")
]


@app.command()
def logs(
    run: RunArgument,
    rank: RankOption = None,
    lines: LinesOption = LINES,
    show_all: AllOption = False,
    follow: FollowOption = False,
    each: EachOption = False,
    launcher: LauncherOption = False,
) -> None:
    """Show what the ranks of RUN printed: lines that several ranks printed stand there once.

    Lines are ordered by training step. `…` stands for what differs between ranks, such as their own
    number. With one --rank its log is shown as it is.

    mpctl logs demo --follow
    mpctl logs demo --rank 3 -n 20
    """
    from mpctl.errors import InputError
    from mpctl.runs.saved import require_run

    if launcher and (rank or each):
        message = "--launcher shows no log of a rank"
        raise InputError.of("usage", "--launcher", message, "leave out --rank and --each")
    if each and follow:
        message = "--each cannot follow"
        raise InputError.of("usage", "--each", message, "use --follow with one --rank, or alone")
    path, count = require_run(run), None if show_all else lines
    if launcher or each or len(set(rank or ())) == 1:
        _show_files(path, rank or [], count, follow=follow, launcher=launcher)
    else:
        _show_merged(path, rank or [], count, follow=follow)


def _show_files(
    run: Path, ranks: list[int], count: int | None, *, follow: bool, launcher: bool
) -> None:
    """The logs one below the other, as they are; under a heading when there are several."""
    from mpctl.render.logs import FileView
    from mpctl.runs.logs import (
        FileFollower,
        chosen_logs,
        follow_until_end,
        last_lines,
        launcher_logs,
    )

    paths = launcher_logs(run) if launcher else list(chosen_logs(run, ranks).values())
    view = FileView(run, with_headings=len(paths) > 1)
    follower = FileFollower(paths)
    for path in paths:
        view.show(path, last_lines(path, count, follower.ends[path]))
    if follow:
        for path, lines in follow_until_end(run, follower.poll):
            view.show(path, lines)
    view.end()


def _show_merged(run: Path, ranks: list[int], count: int | None, *, follow: bool) -> None:
    from mpctl.render.logs import MergedView
    from mpctl.runs.logs import MergedFollower, chosen_logs, follow_until_end, merged_tail

    logs = chosen_logs(run, ranks)
    follower = MergedFollower(run, ranks)
    view = MergedView()
    for entry in merged_tail(logs, count, follower.ends):
        view.show(entry)
    if follow:
        for entry in follow_until_end(run, follower.poll):
            view.show(entry)
    view.end()
