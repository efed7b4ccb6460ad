"""`mpctl search`: find the fastest of the layouts that a job could have."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli import complete
from mpctl.cli.options import AsJsonOption, JobSource, TokensOption, with_job

if TYPE_CHECKING:
    from mpctl.interop.changes import LaunchChanges
    from mpctl.plan.search.document import SearchDocument
    from mpctl.plan.search.request import SearchRequest
    from mpctl.plan.search.result import LayoutReport, SearchResult

ObjectiveOption = Annotated[
    Literal["tokens", "memory", "cost", "days", "energy"],
    typer.Option(
        help="What to optimise: most tokens per second, least memory; or over --gpus, by default "
        "all, fewest GPU-hours, or fewest days or least energy of a run of --tokens."
    ),
]
FixOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Fix this setting at a value instead of searching it, as a flag does: pp=8, zero=1; repeatable.",
        autocompletion=complete.setting,
    ),
]
ExhaustiveOption = Annotated[
    bool,
    typer.Option(
        "--exhaustive",
        help="Estimate every layout instead of excluding layouts by bounds; gives the same "
        "answer, possibly after hours.",
    ),
]
SortOption = Annotated[
    Literal["time", "memory", "cost", "plain"] | None,
    typer.Option(help="Order of the rows; by default the objective's. plain: the simplest first.", show_default=False),
]
AllOption = Annotated[
    bool, typer.Option("--all", help="Also list the layouts that a row stands for, as rows of their own.")
]
CsvOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the layouts as CSV.")]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also write an HTML page: the answers, time against memory, the plan of the fastest layout.",
    ),
]


@with_job(takes_counts=True)
def search(
    job: JobSource,
    top: Annotated[int, typer.Option(min=1, max=1000, help="Number of layouts to show.")] = 5,
    objective: ObjectiveOption = "tokens",
    fix: FixOption = None,
    max_tp: Annotated[int | None, typer.Option(min=1, help="Largest tp to search.")] = None,
    max_pp: Annotated[int | None, typer.Option(min=1, help="Largest pp to search.")] = None,
    max_cp: Annotated[int | None, typer.Option(min=1, help="Largest cp to search.")] = None,
    tokens: TokensOption = None,
    exhaustive: ExhaustiveOption = False,
    sort: SortOption = None,
    every: AllOption = False,
    csv: CsvOption = None,
    html: HtmlOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Find the fastest layout of JOB that fits, of all that its runtime can run, and the plainest of those
    that estimates cannot tell from it.

    Searched are tp with its mode, cp, pp, chunks, schedule, micro batch, recomputation, sequence
    parallelism, ZeRO, order and balance. A flag (--tp 8) or a tensor mode other than 1d fixes its setting.

    Exit codes: 0 a layout was found; 2 bad input, no legal layout, or none that can be timed; 3 no legal
    layout leaves the headroom free.
    """
    from dataclasses import replace

    from mpctl.plan.planning.whole_run import read_tokens
    from mpctl.plan.search.document import search_document
    from mpctl.plan.search.request import gpu_counts, read_request
    from mpctl.plan.search.result import answer_search
    from mpctl.render.progress import PATIENCE, TaskBar

    limits = {"tp": max_tp, "pp": max_pp, "cp": max_cp}
    most = {axis: limit for axis, limit in limits.items() if limit is not None}
    amount = None if tokens is None else read_tokens(tokens)
    request = read_request(job.source, job.own, fix or [], most, tokens=amount, read=job.others)
    request = replace(request, warnings=(*(check.issue for check in job.warnings), *request.warnings))
    counts = gpu_counts(job.counts, objective, request.job)
    with TaskBar(after=PATIENCE) as bar:
        result = answer_search(
            request,
            counts,
            top=top,
            objective=objective,
            exhaustive=exhaustive,
            on_progress=bar.update,
            on_note=bar.note,
            sort=sort,
            ungroup=every,
        )
    document = search_document(result, lambda choice: layout_line(job, request, choice))
    changes = _changes(job, result)
    if changes is not None:
        document["changes"] = changes.as_dict()
    if csv is not None:
        _write_csv(csv, document)
    if html is not None and result.rows:
        options = {
            "--gpus": job.counts,
            "--top": top,
            "--objective": objective,
            "--max-tp": max_tp,
            "--max-pp": max_pp,
            "--max-cp": max_cp,
            "--tokens": tokens,
            "--sort": sort,
            "--html": html,
        }
        again = _again(job, fix or [], options, {"--exhaustive": exhaustive, "--all": every})
        _write_page(html, result, document, again)
    _print(document, changes, as_json=as_json)
    if not result.is_complete:
        raise KeyboardInterrupt


def _write_page(path: Path, result: SearchResult, document: SearchDocument, command: str) -> None:
    from mpctl.render.pictures import write_search_page
    from mpctl.render.progress import PATIENCE, TaskBar

    with TaskBar(after=PATIENCE) as bar:
        write_search_page(path, result, document, command=command, on_progress=bar.update)


def _changes(job: JobSource, result: SearchResult) -> LaunchChanges | None:
    """What makes the job of --from as fast as the fastest layout that was found, in its launcher's keys."""
    if job.read is None or result.fastest is None:
        return None
    from mpctl.interop.changes import launch_changes

    return launch_changes(job.read[0], result.request.job, result.fastest.job)


def _print(document: SearchDocument, changes: LaunchChanges | None, *, as_json: bool) -> None:
    from mpctl.render.output import print_json

    if as_json:
        print_json(document)
        return
    from mpctl.render.output import print_warnings
    from mpctl.render.search import print_search

    warnings = document["warnings"]
    print_warnings([f"{warning['message']}: {warning['hint']}" for warning in warnings])
    print_search(document)
    if changes is not None:
        from mpctl.render.changes import print_changes

        print_changes(changes)


def _again(job: JobSource, fix: list[str], options: Mapping[str, object], switches: Mapping[str, bool]) -> str:
    """The command line that repeats this search."""
    words = [word for text in fix for word in ("--fix", text)]
    words += [str(w) for name, value in options.items() if value is not None for w in (name, value)]
    words += [name for name, is_on in switches.items() if is_on]
    return f"{job.line('search')} {shlex.join(words)}"


def layout_line(job: JobSource, request: SearchRequest, choice: LayoutReport, verb: str | None = None) -> str:
    """The command line of a verb for the layout; by default launches it, or plans it if mpctl cannot launch it."""
    from mpctl.plan.planning.layout_settings import changed_settings, layout_of
    from mpctl.plan.rules.launched import why_not_launched

    verb = verb or ("plan" if why_not_launched(choice.job) else "launch")
    settings = dict(request.typed)
    settings |= changed_settings(layout_of(request.job), choice.layout)
    settings["parallel.dp"] = choice.layout.dp
    if request.opens_batch:  # a plan's would follow from this layout
        settings["training.global_batch_size"] = choice.job.training.global_batch_size
    cluster = choice.job.cluster
    if choice.job.world_size != request.job.world_size:
        settings["cluster.nodes"] = cluster.nodes
        settings["cluster.gpus_per_node"] = cluster.gpus_per_node
    return job.line(verb, settings)


def _write_csv(path: Path, document: SearchDocument) -> None:
    from csv import writer

    from mpctl.core.errors import InputError
    from mpctl.plan.search.document import csv_rows

    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer(file).writerows(csv_rows(document))
    except OSError as error:
        raise InputError.of("unwritable", "--csv", f"{path}: {error.strerror}") from None
