"""`mpctl search`: the layouts that a job could have, and which of them is fastest."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli.options import JobSource, command_line, with_job

if TYPE_CHECKING:
    from mpctl.search.document import SearchDocument
    from mpctl.search.report import Choice
    from mpctl.search.request import SearchRequest

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
@with_job
def search(
    job: JobSource,
    top: Annotated[int, typer.Option(min=1, max=1000, help="Layouts to show.")] = 5,
    objective: Annotated[
        Literal["tokens", "memory", "cost"],
        typer.Option(help="Most tokens a second, least memory, or fewest GPU-hours a token (over "
                     "--gpus, all when absent)."),
    ] = "tokens",
    gpus: Annotated[
        str | None, typer.Option(metavar="N,...", help="Find the best on each of these numbers "
                                 "of GPUs; all: powers of two.", show_default=False)
    ] = None,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Keep a setting as it is here, "
                                       "as a flag does: pp=8, training.dtype=bf16; repeatable.")
    ] = None,
    max_tp: Annotated[int | None, typer.Option(min=1, help="Largest tp.")] = None,
    max_pp: Annotated[int | None, typer.Option(min=1, help="Largest pp.")] = None,
    max_cp: Annotated[int | None, typer.Option(min=1, help="Largest cp.")] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of a GPU-hour; costs are in its currency.")
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Estimate every layout and rule none out: the "
                           "same answer, after hours where there are many.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the layouts found as a table.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page: the answer, time "
                                  "against memory, and the plan of the best layout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:  # fmt: skip
    """Find the layouts of JOB that are fastest and fit, of all that its runtime can run.

    tp, cp, pp, chunks, schedule, micro batch, recomputation, sequence parallelism, ZeRO, order and
    balance are searched; a flag that names one fixes it (mpctl search JOB --tp 8).

    Exit codes: 0 found; 2 bad input, no legal layout, or none whose step can be timed; 3 legal
    layouts, none of which fits.
    """
    from mpctl.render.json import print_json
    from mpctl.render.tasks import PATIENCE, TaskBar
    from mpctl.search.document import search_document
    from mpctl.search.request import parse_gpus, read_request
    from mpctl.search.result import answer_search

    most = {"tp": max_tp, "pp": max_pp, "cp": max_cp}
    request = read_request(
        job.source, job.overrides, fix or [], {k: v for k, v in most.items() if v is not None}
    )
    counts = [request.job.world_size]
    if gpus is not None or objective == "cost":
        counts = parse_gpus(gpus or "all", request.job)
    with TaskBar(after=PATIENCE) as bar:
        answer = answer_search(
            request, counts, top=top, objective=objective, exhaustive=exhaustive,
            on_progress=bar.update,
        )  # fmt: skip
    document = search_document(answer, price, lambda choice: _line(job, request, choice))
    if csv is not None:
        _write_csv(csv, document)
    if html is not None and answer.best:
        from mpctl.render.search import write_page

        options = {
            "--gpus": gpus, "--top": top, "--objective": objective, "--max-tp": max_tp,
            "--max-pp": max_pp, "--max-cp": max_cp, "--price": price, "--html": html,
        }  # fmt: skip
        again = _again(job, fix or [], options, exhaustive=exhaustive)
        with TaskBar(after=PATIENCE) as bar:
            write_page(html, answer, document, command=again, on_progress=bar.update)
    if as_json:
        print_json(document)
    else:
        from mpctl.render.errors import print_warnings
        from mpctl.render.search import print_search

        print_warnings([f"{said['message']}: {said['hint']}" for said in document["warnings"]])
        print_search(document)
    if not answer.is_complete:
        raise KeyboardInterrupt


def _again(
    job: JobSource, fix: list[str], options: Mapping[str, object], *, exhaustive: bool
) -> str:  # fmt: skip
    """The line that makes this search again."""
    words = [word for text in fix for word in ("--fix", text)]
    words += [str(w) for name, value in options.items() if value is not None for w in (name, value)]
    words += ["--exhaustive"] * exhaustive
    return f"{command_line('search', job.source, job.overrides)} {shlex.join(words)}"


def _line(job: JobSource, request: SearchRequest, choice: Choice) -> str:
    """What runs the layout, where mpctl runs it, or plans it."""
    from mpctl.planning.layout_settings import changed_settings, layout_of
    from mpctl.spec.runtime import is_launched

    verb = "launch" if is_launched(choice.job.training.runtime) else "plan"
    settings = dict(request.typed)
    settings |= changed_settings(layout_of(request.job), choice.layout)
    settings["parallel.dp"] = choice.layout.dp
    cluster = choice.job.cluster
    if choice.job.world_size != request.job.world_size:
        settings["cluster.nodes"] = cluster.nodes
        settings["cluster.gpus_per_node"] = cluster.gpus_per_node
    return command_line(verb, job.source, settings)


def _write_csv(path: Path, document: SearchDocument) -> None:
    from csv import writer

    from mpctl.errors import InputError
    from mpctl.search.document import csv_rows

    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer(file).writerows(csv_rows(document))
    except OSError as error:
        raise InputError.of("cannot-write", "--csv", f"{path}: {error.strerror}") from None
