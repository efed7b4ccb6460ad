"""`mpctl plan`: what a layout costs and whether it fits, before any GPU is allocated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli import complete
from mpctl.cli.emit import for_launcher, print_emitted
from mpctl.cli.options import AsJsonOption, JobSource, RuntimesOption, TokensOption, with_job
from mpctl.cli.own_help import RARE
from mpctl.core.errors import DOES_NOT_FIT, InputError
from mpctl.interop.registry import TARGETS

if TYPE_CHECKING:
    from mpctl.core.topology import Topology
    from mpctl.plan.planning.document import RankDocument
    from mpctl.plan.planning.plan import Plan
    from mpctl.plan.planning.whole_run import WholeRun

GroupsOption = Annotated[
    str | None,
    typer.Option(
        help="Process groups to list: tp,dp,... | all | none.", show_default=False, autocompletion=complete.groups
    ),
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Show every node, group, stage and check, even if many are alike.")
]
RankOption = Annotated[int | None, typer.Option(help="Show this rank and the groups it belongs to.")]
HtmlOption = Annotated[Path | None, typer.Option(help="Also write the plan as an HTML page with pictures.")]
SvgOption = Annotated[
    Path | None, typer.Option(rich_help_panel=RARE, help="Also draw layout and timeline into an SVG file.")
]
TraceOption = Annotated[
    Path | None, typer.Option(rich_help_panel=RARE, help="Also write the planned step as a trace for Perfetto.")
]
EmitOption = Annotated[
    str | None,
    typer.Option(
        metavar="LAUNCHER",
        help=f"Print the plan as settings of another launcher, differences as comments: {', '.join(TARGETS)}; "
        "toml: the job as a job file.",
    ),
]


@with_job
def plan(
    job: JobSource,
    as_json: AsJsonOption = False,
    groups: GroupsOption = None,
    ranks: Annotated[bool, typer.Option("--ranks", rich_help_panel=RARE, help="Also list every rank.")] = False,
    full: FullOption = False,
    rank: RankOption = None,
    html: HtmlOption = None,
    svg: SvgOption = None,
    trace: TraceOption = None,
    runtimes: RuntimesOption = None,
    tokens: TokensOption = None,
    emit: EmitOption = None,
) -> None:
    """Show whether a layout fits, its speed, memory and placement.

    The layout alone needs no model (mpctl plan --nodes 2 --gpus-per-node 8 --tp 2 --pp 4).

    Exit codes: 0 the job fits, or that is not known; 2 bad input or an illegal layout; 3 a legal layout that
    leaves less than the headroom (but 0 with --rank).
    """
    pictures = {"html": html, "svg": svg, "trace": trace}
    if emit is not None:
        job = for_launcher(job, emit)
    made = job.plan()
    topology = made.require_legal()
    kinds = _wanted_kinds(groups, topology.kinds)
    run = _whole_run(made, tokens) if tokens is not None else None
    document = None
    if rank is not None:
        from mpctl.plan.planning.document import rank_document

        document = rank_document(made, topology, rank)
    if any(pictures.values()):
        _draw(job, made, topology, pictures, tokens, run, as_json=as_json)
    if emit is not None:
        print_emitted(job, made, emit, as_json=as_json)
    elif document is not None:
        _show_rank(document, as_json=as_json)
    else:
        own = "training.cross_entropy" in job.others
        made = made.evaluate()
        _print_plan(made, topology, kinds, runtimes, run, ranks=ranks, full=full, own_loss=own, as_json=as_json)
    if rank is None and made.fits is False:
        raise typer.Exit(DOES_NOT_FIT)


def _whole_run(made: Plan, tokens: str) -> WholeRun:
    from mpctl.plan.planning.whole_run import plan_whole_run, read_tokens

    return plan_whole_run(made, read_tokens(tokens))


def _wanted_kinds(groups: str | None, known: Collection[str]) -> tuple[str, ...] | None:
    """`"tp,dp"`, `"all"` or `"none"` -> group kinds; None without the option.

    known: the kinds of the topology. Raises InputError for a name that is none of them.
    """
    if groups is None:
        return None
    if groups in ("all", "none"):
        return tuple(known) if groups == "all" else ()
    kinds = tuple(dict.fromkeys(groups.split(",")))
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise InputError.of(
            "unknown-group", "--groups", f"no group is called {unknown[0]!r}", f"use {', '.join(known)}, all or none"
        )
    return kinds


def _draw(
    job: JobSource,
    made: Plan,
    topology: Topology,
    pictures: Mapping[str, Path | None],
    tokens: str | None,
    run: WholeRun | None,
    *,
    as_json: bool,
) -> None:
    """Write the page, picture and trace that have a path, and print their names without --json."""
    from mpctl.render.console import say
    from mpctl.render.pictures import write_pictures
    from mpctl.render.progress import PATIENCE, TaskBar

    line = job.line("plan")
    if tokens is not None:
        line += f" --tokens {quote(tokens)}"
    with TaskBar(after=PATIENCE) as bar:
        write_pictures(
            made,
            topology,
            command=line,
            html=pictures["html"],
            svg=pictures["svg"],
            trace=pictures["trace"],
            run=run,
            on_progress=bar.update,
        )
    for path in filter(None, () if as_json else pictures.values()):
        say(f"wrote {path}", stderr=True)


def _show_rank(document: RankDocument, *, as_json: bool) -> None:
    from mpctl.render.output import print_json

    if as_json:
        print_json(document)
        return
    from mpctl.render.plan import print_rank

    print_rank(document)


def _print_plan(
    made: Plan,
    topology: Topology,
    kinds: tuple[str, ...] | None,
    runtimes: str | None,
    run: WholeRun | None,
    *,
    ranks: bool,
    full: bool,
    own_loss: bool,
    as_json: bool,
) -> None:
    from mpctl.plan.planning.runtimes import is_open, named_runtimes, other_runtimes, same_layout

    names = named_runtimes(runtimes, made.job) if runtimes is not None else []
    asked = same_layout(made, names, own_loss=own_loss)
    if as_json:
        from mpctl.plan.planning.document import plan_document
        from mpctl.render.output import print_json

        print_json(plan_document(made, topology, kinds=kinds, ranks=ranks, runtimes=asked, run=run))
        return
    from mpctl.render.plan import PlanView, print_plan

    has_rows = is_open(made.job) and made.estimate is not None and not asked
    others = same_layout(made, other_runtimes(made.job), own_loss=own_loss) if has_rows else []
    print_plan(made, topology, PlanView(kinds, ranks, full, others, asked, run))
