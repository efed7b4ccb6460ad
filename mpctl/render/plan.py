"""The plan on a terminal: whether it fits and by how much, memory, time and checks first, then the
layout, its groups and their messages.

Repetition is folded: nodes, groups and stages that look alike appear once, a kind of group is one
line, and checks that passed are counted. `--full` prints all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mpctl.core.topology import Topology
from mpctl.core.units import bytes_span_text, bytes_text, count_text, plural, rate_text, seconds_text
from mpctl.plan.planning.document import stack_layers
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.runtimes import UnderRuntime, elsewhere_text, is_open, open_text
from mpctl.plan.planning.summary import (
    experts_text,
    links_text,
    main_figures,
    model_name,
    model_text,
    order_text,
    placement_text,
    sizes_text,
    training_line,
    training_settings,
    verdict,
)
from mpctl.plan.rules.check import Check
from mpctl.render.console import Console, NamedRows, get_console, plain_table
from mpctl.render.fold import fold, members_text, span_text, stage_layers_text
from mpctl.render.plan_layout import grid_part, groups_part, nodes_part, ranks_part

if TYPE_CHECKING:
    from mpctl.model.layout.job_layout import JobLayout
    from mpctl.plan.estimate.explain import Figure, Unit
    from mpctl.plan.estimate.job import Estimate
    from mpctl.plan.estimate.layer_messages import BlockTraffic, PartTraffic
    from mpctl.plan.estimate.memory import StageMemory
    from mpctl.plan.planning.document import RankDocument
    from mpctl.plan.planning.summary import TrainingEntry
    from mpctl.plan.planning.whole_run import WholeRun


MARKS = {"ok": ("✓", "green"), "warning": ("!", "bold yellow"), "error": ("✗", "bold red")}
FITS = {True: ("✓ ", "bold green"), False: ("✗ ", "bold red"), None: ("", "bold")}


def print_plan(
    plan: Plan,
    topology: Topology,
    *,
    kinds: tuple[str, ...] | None,
    ranks: bool,
    full: bool = False,
    others: Sequence[UnderRuntime] = (),
    runtimes: Sequence[UnderRuntime] = (),
    run: WholeRun | None = None,
) -> None:
    """Print the whole plan on stdout.

    kinds: list every group of these kinds; None: the first groups of each kind. ranks: list every
    rank. full: fold nothing. others: the layout under other runtimes, to be said in a line;
    runtimes: under those that were asked for, as a table. run: the run of `--tokens`.
    """
    get_console().print(
        _headline(plan),
        NamedRows([*_runtime_rows(plan, others), *_figures(plan, full=full)]),
        *_warnings(plan),
        *_whole_run(run),
        *_runtimes(runtimes),
        *_paragraphs(plan, topology, kinds, ranks, full),
        sep="\n",
    )


def _whole_run(run: WholeRun | None) -> Iterator[RenderableType]:
    if run is not None:
        from mpctl.plan.planning.whole_run import run_figures

        yield Text("\nThe whole run", "bold")
        yield NamedRows([*run_figures(run)])


def _runtimes(runtimes: Sequence[UnderRuntime]) -> Iterator[RenderableType]:
    if runtimes:
        from mpctl.render.compare import runtimes_table

        yield runtimes_table(runtimes)


def _paragraphs(
    plan: Plan, topology: Topology, kinds: tuple[str, ...] | None, ranks: bool, full: bool
) -> Iterator[RenderableType]:
    estimate = plan.estimate
    facts = [("layout", f"{placement_text(plan)}; {order_text(plan)}")]
    if experts := experts_text(plan.job):
        facts.append(("experts", experts))
    if links := links_text(plan, topology):
        facts.append(("links", links))
    if estimate is not None:
        facts.append(("model", model_text(estimate)))
    yield Text("")
    yield NamedRows(facts)
    if estimate is not None:
        yield memory_part(estimate, full=full)
    yield Text("")
    yield from nodes_part(plan, topology, full=full)
    yield from grid_part(plan, topology)
    yield from groups_part(plan, topology, kinds, full=full)
    if ranks:
        yield ranks_part(plan, topology)
    if estimate is not None:
        for block in estimate.blocks:
            yield from _block_part(block) if block.mode == "1d" else _grid_part(block)
        yield from _pipeline(estimate, topology)
    if full:
        rows = []
        for check in plan.checks:
            mark, style = MARKS[check.status]
            rows.append((Text(mark, style=style), check.rule, Text(_check_text(check))))
        columns = ("", "rule", "answer")
        yield plain_table("\nChecks", columns, rows, left=columns)


def _headline(plan: Plan) -> Text:
    """The model and its layout, whether it fits, by how much, and how it is trained."""
    name, sizes = model_name(plan.job), sizes_text(plan.job)
    mark, style = FITS[plan.fits]
    title = f"{name}: {sizes}" if name else sizes
    said = Text.assemble((title, "bold"), "\n", (f"{mark}{verdict(plan)}", style))
    if plan.job.model is not None:
        said.append(f"\n{training_line(training_settings(plan.job))}")
    return said


def _runtime_rows(plan: Plan, others: Sequence[UnderRuntime]) -> Iterator[tuple[str, str]]:
    """The plan's runtime if nobody named one, and the same layout under others."""
    if not is_open(plan.job) or plan.estimate is None:
        return
    yield "planned for", open_text(plan.job)
    if text := elsewhere_text(others):
        yield "elsewhere", f"{text} (--runtimes all: a table)"


def _figures(plan: Plan, *, full: bool) -> Iterator[tuple[str | Text, str]]:
    """Memory, step time with its parts and why they may be wrong, speed, and how many checks
    passed."""
    figures = dict(main_figures(plan))
    if "memory" in figures:
        yield "memory", figures.pop("memory")
    time = plan.estimate.time if plan.estimate else ""
    for name, text in figures.items():
        yield name, text
        if name == "step time" and not isinstance(time, str):
            parts = time.parts().items()
            yield "parts", ", ".join(f"{part} {seconds_text(s)}" for part, s in parts if s)
            if time.extrapolates:
                yield Text("extrapolated", "yellow"), "; ".join(time.extrapolates)
            if plan.estimate and plan.estimate.measure_next:
                yield "measure next", plan.estimate.measure_next
    passed = sum(check.status == "ok" for check in plan.checks)
    others = sum(check.status != "ok" and check.rule != "memory-fits" for check in plan.checks)
    noted = f", {plural(others, 'warning')} below" if others else ""
    where = "" if full else " (--full: what each found)"
    yield "checks", f"✓ {passed} passed{noted}{where}"


def _warnings(plan: Plan) -> Iterator[Text]:
    """Every check that did not pass, with its hint; for memory the hint alone."""
    for check in plan.checks:
        if check.rule == "memory-fits" and check.status != "ok":
            yield Text(f"→ {check.hint}")
        elif check.status != "ok":
            mark, style = MARKS[check.status]
            yield Text.assemble((f"{mark}  ", style), (f"{check.rule}: ", "bold"), _check_text(check))


def _check_text(check: Check) -> str:
    return check.message + (f" → {check.hint}" if check.hint else "")


def print_rank(document: RankDocument) -> None:
    """One rank on stdout: its node and coordinates, its layers, and the groups that it is in."""
    console = get_console()
    coords = ", ".join(f"{axis} {index}" for axis, index in document["coords"].items())
    console.print(
        Text.assemble(
            (f"rank {document['rank']}", "bold"),
            f" of {document['world_size']}: node ",
            f"{document['node']}, local rank {document['local_rank']}; {coords}",
        )
    )
    if "layers" in document:
        console.print(f"layers {stage_layers_text(document['layers'], document.get('stacks'))}")
    for tensor, parts in document.get("tensor_blocks", {}).items():
        spans = (f"{dim} {span_text(first, stop - 1)}" for dim, (first, stop) in parts.items())
        console.print(f"{tensor}: {', '.join(spans)}")
    rows = [(kind, str(len(group)), members_text(group, whole=True)) for kind, group in document["groups"].items()]
    console.print(plain_table("", ("group", "size", "members"), rows, left=("group", "members")))


SHOWN_STAGES = 8  # listed one by one; of more, the first SHOWN_ENDS, the last and the fullest
SHOWN_ENDS = 2
SIZES = ("states", "activations", "temporary", "allocated", "on device")


def _block_part(block: BlockTraffic) -> Iterator[RenderableType]:
    """The messages of a block over tp, a row for each split layer."""
    columns, whole = ("parallel layer", "all-reduces", "volume", "bytes"), block.whole
    rows = [
        (name, str(part.all_reduces), f"{part.volume_phi:g} Φ", bytes_text(part.volume_bytes))
        for name, part in [*block.parts.items(), ("block", whole)]
    ]
    yield _with_sum(plain_table(_title(block), columns, rows, left=columns[:1]))
    ring = f"a ring of {block.tp} sends {bytes_text(whole.ring_bytes_per_rank)} a rank"
    note = f"Φ = {bytes_text(whole.phi_bytes)}, one micro batch's hidden states; {ring}"
    yield Text(note, style="dim")


def _grid_part(block: BlockTraffic) -> Iterator[RenderableType]:
    """A row for each axis of the grid and kind of collective of each part of a block."""
    columns = ("part", "axis", "collective", "count", "volume", "a rank sends")
    rows = []
    for name, part in block.parts.items():
        for at, sent in enumerate(part.by_kind()):
            first = sent.messages[0]
            what = ("" if at else name, first.axis, first.kind.replace("_", "-"))
            rows.append((*what, *_amounts(sent)))
    rows.append(("block", "", "", *_amounts(block.whole)))
    yield _with_sum(plain_table(_title(block), columns, rows, left=columns[:3]))
    note = "one micro batch; of a broadcast or a reduce what a rank sends on the average"
    yield Text(note, style="dim")


def _title(block: BlockTraffic) -> str:
    return f"\nTensor-parallel traffic of one {f'{block.stack.name} block'.lstrip()}"


def _with_sum(table: Table) -> Table:
    """The table with its last row, the total, in bold."""
    table.rows[-1].style = "bold"
    return table


def _amounts(sent: PartTraffic) -> tuple[str, str, str]:
    """The number of collectives, their volume, and the bytes that a rank of a ring sends."""
    count = sum(message.count for message in sent.messages)
    return str(count), bytes_text(sent.volume_bytes), bytes_text(sent.ring_bytes_per_rank)


def _pipeline(estimate: Estimate, topology: Topology) -> Iterator[RenderableType]:
    """The messages of each stage to its neighbours, and sums over stages that share parameters;
    with its nodes, if its ranks are consecutive and there are several nodes."""
    if len(estimate.messages) == 1:
        return
    sent = []
    for messages in estimate.messages:
        sends = [m for m in messages if (m.axis, m.kind) == ("pp", "send")]
        shared = sum(m.bytes for m in messages if m.what == "shared parameters")
        size = sum(m.bytes * m.count for m in sends)
        sent.append((f"{sum(m.count for m in sends):,}", *map(bytes_text, (size, shared))))
    stride = topology.strides["pp"]
    has_nodes = topology.nodes > 1 and stride * topology.sizes["pp"] == topology.world_size
    rows = []
    for first, last in fold(sent):
        ends = topology.node(first * stride), topology.node((last + 1) * stride - 1)
        rows.append((span_text(first, last), *sent[first], *[span_text(*ends)][:has_nodes]))
    columns = ("stage", "messages", "bytes", "shared", *["nodes"][:has_nodes])
    title = "\nPipeline traffic of one step"
    yield plain_table(title, columns, rows, left=("stage", "nodes"))
    yield Text("shared: gradients of parameters that several stages hold, summed over them", style="dim")


def memory_part(estimate: Estimate, *, full: bool) -> Table:
    """The memory of one rank of each stage; like stages share a row, unless full."""
    memory, rows = estimate.memory, []
    for first, last in _shown(memory, full=full):
        stages = memory[first : last + 1]
        counts = sorted({stage.parameters for stage in stages})
        parameters = "-".join(count_text(count) for count in dict.fromkeys((counts[0], counts[-1])))
        sizes = (
            [stage.state_bytes for stage in stages],
            [stage.activation_bytes for stage in stages],
            [stage.temporary_bytes for stage in stages],
            [stage.allocated_bytes for stage in stages],
            [stage.device_bytes for stage in stages],
        )
        spans = (bytes_span_text(min(column), max(column)) for column in sizes)
        layers = _layers(estimate.layout, first, last)
        rows.append((span_text(first, last), layers, parameters, *spans))
    title = "\nMemory of one rank, by stage, at its peak"
    columns = ("stage", "layers", "params", *SIZES)
    table = plain_table(title, columns, rows, left=("stage", "layers"))
    table.padding = (0, 1, 0, 0)  # eight columns of sizes, in a terminal of 80
    return table


def _shown(memory: Sequence[StageMemory], *, full: bool) -> list[tuple[int, int]]:
    """Spans of stages, a row each; of many, only the ends and the fullest alone."""
    count = len(memory)
    if full or count <= SHOWN_STAGES:
        return [(stage, stage) for stage in range(count)]
    fullest = max(range(count), key=lambda stage: memory[stage].device_bytes)
    alone = {*range(SHOWN_ENDS), count - 1, fullest}
    return fold([stage if stage in alone else -1 for stage in range(count)])


def _layers(layout: JobLayout, first: int, last: int) -> str:
    """The layers of stages first to last, as text; if a stage has several chunks, those of the
    first and of the last stage."""
    spans = layout.stages[first], layout.stages[last]
    stacks = [stack_layers(layout, held) for held in spans]
    if first != last and len(spans[0]) == 1 and stacks[0] is None:
        return span_text(spans[0][0][0], spans[1][-1][1] - 1)
    texts = [stage_layers_text(held, parts) for held, parts in zip(spans, stacks, strict=True)]
    return texts[0] if first == last else f"{texts[0]} ... {texts[1]}"


TEXTS: dict[Unit, Callable[[float], str]] = {
    "B": bytes_text,
    "s": seconds_text,
    "FLOP": lambda value: f"{count_text(value)}FLOP",
    "FLOP/s": rate_text,
    "B/s": lambda value: f"{bytes_text(value)}/s",
    "%": lambda value: f"{value:.1f} %",
    "": lambda value: f"{value:g}",
}


def print_figures(figures: Iterable[Figure], training: TrainingEntry) -> None:
    """Print figures on stdout under how the job is trained: name and value, and below them formula,
    numbers and source."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(training_line(training))
    for figure in figures:
        console.print(Text.assemble((figure.name, "bold"), " = ", (TEXTS[figure.unit](figure.value), "cyan")))
        console.print(Text(f"    {figure.formula}"))
        console.print(Text(f"    {figure.numbers}", "dim"))
        if figure.source:
            console.print(Text(f"    {figure.source}", "dim italic"))
