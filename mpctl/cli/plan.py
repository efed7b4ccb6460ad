"""`mpctl plan`: what a layout costs and whether it fits, before any GPU is allocated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli import complete
from mpctl.cli import plan_modes as modes
from mpctl.cli.options import AsJsonOption, JobSource, RuntimesOption, TokensOption, command_line, with_job
from mpctl.core.errors import DOES_NOT_FIT, InputError
from mpctl.interop.registry import SOURCES, TARGETS

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
SvgOption = Annotated[Path | None, typer.Option(help="Also draw layout and timeline into an SVG file.")]
TraceOption = Annotated[Path | None, typer.Option(help="Also write the planned step as a trace for Perfetto.")]
BatchOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Estimate many jobs: one JSON object per line in FILE (- for stdin), one answer per "
        "line on stdout. The answer to a bad line lists its issues; the exit code is 0 if FILE "
        "could be read.",
    ),
]
CompareOption = Annotated[bool, typer.Option("--compare", help="Compare JOB with others: --compare demo tp=1,dp=2")]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain", help="Show figures with their formulas and numbers: --explain, or JOB --explain memory.stage-0"
    ),
]
ModesOption = Annotated[
    bool,
    typer.Option(
        "--compare-tensor-modes",
        help="Compare 1d, 2d, 2.5d and 3d tensor parallelism, in symbols and with JOB's numbers, "
        "for its tp or for given sizes: JOB --compare-tensor-modes 4 8 64",
    ),
]
EmitOption = Annotated[
    str | None,
    typer.Option(
        metavar="LAUNCHER",
        help=f"Print the plan as settings of another launcher, differences as comments: {', '.join(TARGETS)}.",
    ),
]
FromOption = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--from",
        metavar='LAUNCHER "FLAGS"',
        help="Read the job from another launcher's command line or config: --from megatron "
        f'"--num-layers 24 ..." (@FILE: a file with it, -: stdin); {", ".join(SOURCES)}.',
        show_default=False,
    ),
]
MoreOption = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB ... | FIGURE ... | TP ...]",
        help="Arguments of --compare, --explain or --compare-tensor-modes.",
        autocompletion=complete.preset_of("jobs"),
        show_default=False,
    ),
]


@with_job
def plan(
    job: JobSource,
    as_json: AsJsonOption = False,
    groups: GroupsOption = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="Also list every rank.")] = False,
    full: FullOption = False,
    rank: RankOption = None,
    html: HtmlOption = None,
    svg: SvgOption = None,
    trace: TraceOption = None,
    batch: BatchOption = None,
    compare: CompareOption = False,
    explain: ExplainOption = False,
    compare_tensor_modes: ModesOption = False,
    runtimes: RuntimesOption = None,
    tokens: TokensOption = None,
    emit: EmitOption = None,
    from_: FromOption = None,
    more: MoreOption = None,
) -> None:
    """Show a layout: whether it fits, its speed and memory, the place of each rank, its messages.

    The layout alone needs no model (mpctl plan --nodes 2 --gpus-per-node 8 --tp 2 --pp 4).

    Exit codes: 0 the job fits, or that is not known; 2 bad input or an illegal layout; 3 a legal layout that
    leaves less than the headroom. --rank, --explain, --compare, --compare-tensor-modes and --batch exit with
    0 whether it fits or not.
    """
    pictures = {"html": html, "svg": svg, "trace": trace}
    others = {
        "--batch": batch is not None,
        "--compare": compare,
        "--explain": explain,
        "--compare-tensor-modes": compare_tensor_modes,
    }
    words = more or []
    is_typed = "training.runtime" in job.overrides
    if from_ is not None:
        if explain or compare_tensor_modes:
            job, words = job.without_source(words)
        job = modes.read_from(job, *from_)
    if emit is not None and not is_typed:
        job = modes.for_launcher(job, emit, is_read=from_ is not None)
    if any(others.values()) or words:
        shown = any(value is not None for value in (*pictures.values(), emit, runtimes, tokens))
        _require_one_mode(others, words, shows_a_plan=shown)
        if batch is not None:
            modes.run_batch(job, batch, words)
        elif compare:
            modes.compare(job, words, as_json=as_json)
        elif explain:
            modes.explain(job, words, as_json=as_json)
        else:
            modes.compare_tensor_modes(job, words, as_json=as_json)
        return
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
        modes.print_emitted(made, emit, as_json=as_json)
    elif document is not None:
        _show_rank(document, as_json=as_json)
    else:
        _print_plan(made.evaluate(), topology, kinds, runtimes, run, ranks=ranks, full=full, as_json=as_json)
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


def _require_one_mode(asked: Mapping[str, bool], words: list[str], *, shows_a_plan: bool) -> None:
    """Raises InputError unless exactly one mode is asked for, without options that show a plan."""
    *most, last = asked
    if shows_a_plan:
        message = "--html, --svg, --trace, --emit, --runtimes and --tokens are of one job, not"
        raise InputError.of("usage", "command line", f"{message} {', '.join(most)} or {last}")
    if sum(asked.values()) != 1:
        wrong = f"extra arguments {', '.join(words)}" if words else "more than one is asked for"
        ways = "--batch, --compare JOB ..., --explain FIGURE ... or --compare-tensor-modes TP ..."
        hint = "use one of them at a time"
        raise InputError.of("usage", "command line", f"{wrong}: {ways}", hint)


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

    line = command_line("plan", job.source, job.overrides)
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
    as_json: bool,
) -> None:
    from mpctl.plan.planning.runtimes import is_open, named_runtimes, other_runtimes, same_layout

    asked = same_layout(made, named_runtimes(runtimes, made.job)) if runtimes is not None else []
    if as_json:
        from mpctl.plan.planning.document import plan_document
        from mpctl.render.output import print_json

        print_json(plan_document(made, topology, kinds=kinds, ranks=ranks, runtimes=asked, run=run))
        return
    from mpctl.render.plan import PlanView, print_plan

    has_rows = is_open(made.job) and made.estimate is not None and not asked
    others = same_layout(made, other_runtimes(made.job)) if has_rows else []
    print_plan(made, topology, PlanView(kinds, ranks, full, others, asked, run))
