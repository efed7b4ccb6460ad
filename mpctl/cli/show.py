"""`mpctl show`: a summary of runs, or the curves of several runs in one diagram."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli import complete

if TYPE_CHECKING:
    from mpctl.runs.saved import SavedRun
    from mpctl.runs.show import Series, X

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
PATIENCE = 1.0  # seconds before progress is shown


RunOption = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN ...",
        help="Run directories, or names in runs/.",
        autocompletion=complete.run,
    ),
]
PlotOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC",
        help="Draw a metric: loss, val, lr, grad_norm, "
        "tokens_per_second or any other in metrics.jsonl; repeatable.",
    ),
]
XOption = Annotated[
    Literal["step", "tokens", "time"], typer.Option("--x", help="The x axis of the curves.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw into a .png or .svg file instead of the terminal."),
]
CsvOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the run's metrics as CSV.")
]
TensorboardOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write the run's metrics as TensorBoard events."),
]
AsJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the summaries, or with --plot the curves, as JSON.")
]


@app.command()
def show(
    run: RunOption,
    plot: PlotOption = None,
    x: XOption = "step",
    out: OutOption = None,
    csv: CsvOption = None,
    tensorboard: TensorboardOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Summarise a run, draw its metrics, or export them.

    mpctl show runs/demo
    mpctl show demo demo-2 --plot loss --plot val --x tokens
    mpctl show demo --plot loss --out loss.png
    """
    from mpctl.render.progress import TaskBar
    from mpctl.runs.show import open_runs

    with TaskBar(after=PATIENCE) as bar:
        runs = open_runs(run, bar.update)
    if csv or tensorboard:
        _export(runs, csv, tensorboard)
    elif plot or out:
        _plot(runs, plot or ["loss"], x, out, as_json=as_json)
    else:
        _summarise(runs, as_json=as_json)


def _summarise(runs: list[SavedRun], *, as_json: bool) -> None:
    from mpctl.runs.show import show_document

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


def _plot(
    runs: list[SavedRun], metrics: list[str], x: X, out: Path | None, *, as_json: bool
) -> None:
    from mpctl.runs.show import find_series, series_document

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
        _draw(series, x)


def _draw(series: list[Series], x: X) -> None:
    from mpctl.render.curves import print_plot

    print_plot(series, x)


def _export(runs: list[SavedRun], csv: Path | None, tensorboard: Path | None) -> None:
    from mpctl.render.console import say
    from mpctl.render.progress import TaskBar
    from mpctl.runs.show import export

    with TaskBar(after=PATIENCE) as bar:
        written = list(export(runs, csv, tensorboard, bar.update))
    for path in written:
        say(f"wrote {path}")
