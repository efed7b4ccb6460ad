"""`mpctl plan`: what a layout means before any GPU is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpctl.cli.options import JobSource, with_job
from mpctl.errors import InputError

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
@with_job
def plan(
    job: JobSource,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    groups: Annotated[
        str | None,
        typer.Option(help="Group kinds to list: tp,dp,... | all | none.", show_default=False),
    ] = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="List every rank as well.")] = False,
    rank: Annotated[
        int | None, typer.Option(help="Show one rank and every group it is in.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Also write what is shown as an SVG picture.")
    ] = None,
) -> None:
    """Show a layout: rank groups, placement on nodes, checks, communication, memory, time.

    Works without a model too: mpctl plan --nodes 2 --gpus-per-node 8 --tp 2 --pp 4
    """
    from mpctl.document import plan_document, rank_document, wanted_kinds
    from mpctl.render.json import print_json

    if svg is not None and (as_json or rank is not None):
        raise InputError.of("usage", "--svg", "draws the plan's tables, not --json or --rank")
    made = job.plan()
    topology = made.require_legal()
    kinds = wanted_kinds(groups)
    if rank is not None:
        document = rank_document(made, topology, rank)
    elif as_json:
        document = plan_document(made, topology, kinds=kinds, ranks=ranks)
    if as_json:
        print_json(document)
        return
    from mpctl.render.plan import print_plan, print_rank

    if rank is not None:
        print_rank(document)
    else:
        print_plan(made, topology, kinds=kinds, ranks=ranks, svg=svg)
