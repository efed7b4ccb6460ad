"""`mpctl runs`, `status`, `logs`, `stop` and `show`: finished runs, and those that train now."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli import complete
from mpctl.cli.options import AsJsonOption, OtherOwnerOption, RunArgument
from mpctl.cli.via import ViaOption, run_there

if TYPE_CHECKING:
    from mpctl.run.history.saved import SavedRun
    from mpctl.run.history.show import X


FolderOption = Annotated[Path, typer.Argument(help="A folder with runs, a folder with folders of runs, or one run.")]
SortOption = Annotated[
    str,
    typer.Option(
        help="Column to sort by: name, status, model, step, loss, validation_loss, "
        "tokens_per_second, started, ended or checkpoint_bytes."
    ),
]


def runs(
    context: typer.Context,
    folder: FolderOption = Path("runs"),
    sort: SortOption = "started",
    reverse: Annotated[bool, typer.Option("--reverse", help="Largest or latest first.")] = False,
    as_json: AsJsonOption = False,
    via: ViaOption = None,
) -> None:
    """List the runs in FOLDER: status, step, losses, speed, layout.

    Status: submitted (waits for its scheduler), running, finished, stopped (on request), failed,
    interrupted (the launcher was killed or the machine went down) or unreadable (job.json is
    damaged).
    """
    if via is not None:
        run_there(via, context)
    from mpctl.render.output import print_json
    from mpctl.run.history.listing import list_runs

    if as_json:
        print_json(list_runs(folder, sort=sort, reverse=reverse))
        return
    from mpctl.render.progress import PATIENCE, TaskBar
    from mpctl.render.runs import print_runs

    with TaskBar(after=PATIENCE) as bar:
        listing = list_runs(
            folder, sort=sort, reverse=reverse, on_progress=lambda done, total: bar.update("reading runs", done, total)
        )
    print_runs(listing)


WatchOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=1,
        show_default=False,
        help="Show it again every so many seconds until the run has ended.",
    ),
]


def status(
    context: typer.Context,
    run: RunArgument,
    watch: WatchOption = None,
    as_json: AsJsonOption = False,
    allow_other_owner: OtherOwnerOption = False,
    via: ViaOption = None,
) -> None:
    """Show RUN's progress, time left and what every rank is doing.

    Status: submitted (waits for its scheduler), running, finished, stopped (on request), failed,
    interrupted (its launcher is gone and did not say how the run ended) or unreadable (job.json is
    damaged). The exit code is 0 for every status.
    """
    if via is not None:
        run_there(via, context)
    from mpctl.run.history.saved import require_own_run, short_name
    from mpctl.run.history.status import status_of

    path = require_own_run(run, allow_other_owner=allow_other_owner)
    while True:
        document = status_of(path, short_name(run))
        if as_json:
            from mpctl.render.output import print_json

            print_json(document)
        else:
            from mpctl.render.runs import print_status

            print_status(document, clears=watch is not None)
        if watch is None or document["status"] not in ("running", "submitted"):
            return
        time.sleep(watch)


LINES = 100


RankOption = Annotated[
    list[int] | None, typer.Option(metavar="N", min=0, help="Only this rank; repeatable. All ranks by default.")
]
LinesOption = Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="Show the last N lines.")]
AllOption = Annotated[bool, typer.Option("--all", help="Show all lines.")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends.")]
EachOption = Annotated[bool, typer.Option("--each", help="Show the ranks' logs one after another.")]
LauncherOption = Annotated[
    bool, typer.Option("--launcher", help="Show the logs of the launcher, torchrun and the nodes.")
]


def logs(
    context: typer.Context,
    run: RunArgument,
    rank: RankOption = None,
    lines: LinesOption = LINES,
    show_all: AllOption = False,
    follow: FollowOption = False,
    each: EachOption = False,
    launcher: LauncherOption = False,
    via: ViaOption = None,
) -> None:
    """Show what the ranks of RUN printed.

    Lines that several ranks printed appear once. Lines are ordered by training step. `…` marks text that
    differs between ranks, such as the rank's number. With one --rank its log is shown unchanged.

    mpctl logs demo --follow
    mpctl logs demo --rank 3 -n 20
    """
    if via is not None:
        run_there(via, context)
    from mpctl.core.errors import InputError
    from mpctl.run.history.saved import require_run

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


def _show_files(run: Path, ranks: list[int], count: int | None, *, follow: bool, launcher: bool) -> None:
    """Print the logs unchanged, one after another, each under a heading when there are several."""
    from mpctl.render.logs import FileView
    from mpctl.run.history.logs import FileFollower, chosen_logs, follow_until_end, last_lines, launcher_logs

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
    from mpctl.run.history.logs import MergedFollower, chosen_logs, follow_until_end, merged_tail

    logs = chosen_logs(run, ranks)
    follower = MergedFollower(run, ranks)
    view = MergedView()
    for entry in merged_tail(logs, count, follower.ends):
        view.show(entry)
    if follow:
        for entry in follow_until_end(run, follower.poll):
            view.show(entry)
    view.end()


NowOption = Annotated[bool, typer.Option("--now", help="End ranks at once; loses steps since the last checkpoint.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0,
        show_default=False,
        help="Wait at most this long for the end; the request remains. By default, no limit.",
    ),
]


def stop(
    context: typer.Context,
    run: RunArgument,
    now: NowOption = False,
    timeout: TimeoutOption = None,
    as_json: AsJsonOption = False,
    allow_other_owner: OtherOwnerOption = False,
    via: ViaOption = None,
) -> None:
    """Ask RUN to finish its step, save a checkpoint and end.

    Wait for the end and report what was saved. Works from any host that shares the run's directory. Exit
    code: 0 when the run finished or was stopped in order, now or earlier; 1 when it failed, was interrupted, or
    still runs after the --timeout.
    """
    if via is not None:
        run_there(via, context)
    from mpctl.render.runs import StopView, print_stopped
    from mpctl.run.history.saved import require_own_run, short_name
    from mpctl.run.history.stop import stop_run

    path = require_own_run(run, allow_other_owner=allow_other_owner)
    with StopView(short_name(run)) as view:
        stopped = stop_run(path, short_name(run), now=now, timeout=timeout, on_wait=view.update)
    if as_json:
        from mpctl.render.output import print_json

        print_json(stopped.as_dict())
    else:
        print_stopped(stopped)
    raise typer.Exit(0 if stopped.is_in_order else 1)


RunsArgument = Annotated[
    list[Path],
    typer.Argument(metavar="RUN ...", help="Run directories, or names in runs/.", autocompletion=complete.run),
]
PlotOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC",
        help="Draw a metric: loss, val, lr, grad_norm, tokens_per_second or any other in metrics.jsonl; repeatable.",
    ),
]
XOption = Annotated[Literal["step", "tokens", "time"], typer.Option("--x", help="The x axis of the curves.")]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw to a .png or .svg file instead of the terminal.")
]
CsvOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run's metrics as CSV.")]
TensorboardOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Write the run's metrics as TensorBoard events.")
]
RunPageOption = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Write a page of the run: curves, where its time went, plan and run, failure."
    ),
]
CurvesJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the summaries, or with --plot the curves, as JSON.")
]


def show(
    context: typer.Context,
    run: RunsArgument,
    plot: PlotOption = None,
    x: XOption = "step",
    out: OutOption = None,
    csv: CsvOption = None,
    tensorboard: TensorboardOption = None,
    html: RunPageOption = None,
    as_json: CurvesJsonOption = False,
    via: ViaOption = None,
) -> None:
    """Summarise a run, draw its metrics, or export them.

    mpctl show runs/demo
    mpctl show runs/demo --html demo.html
    mpctl show demo demo-2 --plot loss --plot val --x tokens
    mpctl show demo --plot loss --out loss.png
    """
    if via is not None:
        run_there(via, context)
    from mpctl.render.progress import PATIENCE, TaskBar
    from mpctl.run.history.show import open_runs

    with TaskBar(after=PATIENCE) as bar:
        runs = open_runs(run, bar.update)
    if csv or tensorboard:
        _export(runs, csv, tensorboard)
    elif html:
        _write_page(runs, html, x)
    elif plot or out:
        _plot(runs, plot or ["loss"], x, out, as_json=as_json)
    else:
        _summarise(runs, as_json=as_json)


def _summarise(runs: list[SavedRun], *, as_json: bool) -> None:
    from mpctl.run.history.show import show_document

    document = show_document(runs)
    if as_json:
        from mpctl.render.output import print_json

        print_json(document)
        return
    from mpctl.render.runs import print_run

    for number, (run, shown) in enumerate(zip(runs, document["runs"], strict=True)):
        if number:
            print()
        print_run(run, shown)


def _plot(runs: list[SavedRun], metrics: list[str], x: X, out: Path | None, *, as_json: bool) -> None:
    from mpctl.run.history.show import find_series, series_document

    if out is not None:
        from mpctl.render.curves import check_picture

        check_picture(out)
    series = find_series(runs, metrics, x)
    if out is not None:
        from mpctl.render.curves import write_picture

        write_picture(out, series, x)
    if as_json:
        from mpctl.render.output import print_json

        print_json(series_document(series, x))
    elif out is not None:
        from mpctl.render.console import say

        say(f"wrote {out}")
    else:
        from mpctl.render.curves import print_plot

        print_plot(series, x)


def _write_page(runs: list[SavedRun], path: Path, x: X) -> None:
    from mpctl.render.console import say
    from mpctl.render.markup import write_text
    from mpctl.render.runs import run_page
    from mpctl.run.history.show import only_run

    run = only_run(runs, "--html")
    command = shlex.join(["mpctl", "show", str(run.path), "--html", str(path), "--x", x])
    write_text(path, run_page(run, command, x), option="--html")
    say(f"wrote {path}")


def _export(runs: list[SavedRun], csv: Path | None, tensorboard: Path | None) -> None:
    from mpctl.render.console import say
    from mpctl.render.progress import PATIENCE, TaskBar
    from mpctl.run.history.show import export

    with TaskBar(after=PATIENCE) as bar:
        written = list(export(runs, csv, tensorboard, bar.update))
    for path in written:
        say(f"wrote {path}")
