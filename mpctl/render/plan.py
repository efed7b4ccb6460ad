"""A plan: whether it fits and by how much, memory, time and warnings first, then memory by stage and the
placement of ranks; with `--full` and on a page also groups, their messages, the schedule and every check.

Repetition is folded: nodes, groups and stages that look alike appear once, a kind of group is one
line, and checks that passed are counted. `--full` prints all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from mpctl.core.topology import Topology
from mpctl.core.units import bytes_span_text, bytes_text, count_text, plural, rate_text, seconds_text
from mpctl.model.pipeline.explicit import find_layout
from mpctl.plan.planning.document import stack_layers
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.runtimes import UnderRuntime, elsewhere_text, is_open, open_text
from mpctl.plan.planning.summary import (
    experts_text,
    headline_figures,
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
from mpctl.render.console import Console
from mpctl.render.fold import fold_ends, members_text, span_text, stage_layers_text
from mpctl.render.parts import (
    Bar,
    Bars,
    Column,
    DataTable,
    Facts,
    Figures,
    Part,
    Picture,
    Section,
    Sentence,
    Style,
    table_of,
)
from mpctl.render.plan_layout import layout_parts
from mpctl.render.plan_traffic import traffic_parts
from mpctl.render.terminal import print_parts
from mpctl.spec.figure_sources import sources_text
from mpctl.spec.layout_text import write_layout

if TYPE_CHECKING:
    from mpctl.model.layout.job_layout import JobLayout
    from mpctl.plan.estimate.explain import Figure, Unit
    from mpctl.plan.estimate.job import Estimate
    from mpctl.plan.estimate.memory import StageMemory
    from mpctl.plan.estimate.timeline import StepLine
    from mpctl.plan.planning.document import RankDocument
    from mpctl.plan.planning.summary import TrainingEntry
    from mpctl.plan.planning.whole_run import WholeRun
    from mpctl.render.markup import Raw

FITS: dict[bool | None, Style] = {True: "passed", False: "failed", None: "head"}
MARKS = {"ok": "✓ ok", "warning": "! warning", "error": "✗ error"}


class PlanView(NamedTuple):
    """Options for showing a plan. kinds: list every group of these kinds; None: the first groups of each
    kind, where there is no estimate or all is shown. ranks: list every rank. full: fold nothing. others:
    the layout under other runtimes, in one line; runtimes: under requested runtimes, as a table. run: the
    run of `--tokens`. search: the parts of the search that found the layout. is_page: include the parts
    that only a page shows."""

    kinds: tuple[str, ...] | None = None
    ranks: bool = False
    full: bool = False
    others: Sequence[UnderRuntime] = ()
    runtimes: Sequence[UnderRuntime] = ()
    run: WholeRun | None = None
    search: Sequence[Part] = ()
    is_page: bool = False


def print_plan(plan: Plan, topology: Topology, view: PlanView) -> None:
    """Print the whole plan on stdout."""
    print_parts(plan_parts(plan, topology, view), full=view.full)


def plan_parts(plan: Plan, topology: Topology, view: PlanView) -> Iterator[Part]:
    """The parts of a plan."""
    estimate, name = plan.estimate, model_name(plan.job)
    yield Sentence(f"{name}: {sizes_text(plan.job)}" if name else sizes_text(plan.job), "title")
    yield Sentence(verdict(plan), FITS[plan.fits])
    if plan.job.model is not None:
        yield Sentence(training_line(training_settings(plan.job)))
    yield Figures(list(headline_figures(plan)))
    if plan.figures_from:
        yield Sentence(f"figures: {sources_text(plan.figures_from)}")
    yield Facts([*_runtime_rows(plan, view.others), *_figures(plan)])
    yield from _warnings(plan)
    yield Facts(list(_layout_rows(plan, topology)))
    yield from view.search
    if view.run is not None:
        from mpctl.plan.planning.whole_run import run_figures

        yield Section("run", "The whole run")
        yield Facts([*run_figures(view.run)], "The whole run")
    if view.runtimes:
        from mpctl.render.compare import runtimes_table

        yield runtimes_table(view.runtimes)
    if estimate is not None:
        yield from stages_picture(plan)
        yield from memory_parts(plan, estimate, full=view.full)
    is_deep = view.full or view.is_page
    kinds = () if view.kinds is None and estimate is not None and not is_deep else view.kinds
    yield from layout_parts(plan, topology, kinds, ranks=view.ranks, full=view.full)
    if estimate is not None and is_deep:
        yield from _schedule(plan, estimate)
        yield from _time(estimate)
        yield from traffic_parts(plan, estimate, topology)
    yield Section("checks", "Checks", folded=f"{plural(len(plan.checks), 'rule')} and what each found")
    checks = sorted(plan.checks, key=lambda check: check.status == "ok")
    rows = [(MARKS[check.status], check.rule, _check_text(check)) for check in checks]
    columns = ("", "rule", "answer")
    yield table_of("Every rule and its answer", columns, rows, left=columns, fold="terminal")
    if not view.full:
        more = ("rank groups, traffic, schedule", "step time by part") if estimate is not None else ()
        yield Sentence(f"--full: {', '.join((*more, 'every check'))}", "note", "terminal")


def stages_picture(plan: Plan) -> Iterator[Part]:
    """What each stage of an explicit layout has, chunk by chunk in its letters; like stages share a row."""
    layout, pp = find_layout(plan.job), plan.job.parallel.pp
    if layout is None or layout.problems:
        return
    words = [write_layout([part]) for part in layout.parts]
    rows, stages = list[tuple[str, ...]](), range(pp)
    for _, alike in groupby(stages, key=lambda stage: words[stage::pp]):
        held = list(alike)
        rows.append((span_text(held[0], held[-1]), *(word or "-" for word in words[held[0] :: pp])))
    columns = ("stage", *(f"chunk {chunk}" for chunk in range(len(words) // pp)))
    yield table_of("What each stage has: E embedding, t layer, m prediction, L loss", columns, rows, left=columns)


def _layout_rows(plan: Plan, topology: Topology) -> Iterator[tuple[str, str]]:
    yield "layout", f"{placement_text(plan)}; {order_text(plan)}"
    if experts := experts_text(plan.job):
        yield "experts", experts
    if links := links_text(plan, topology):
        yield "links", links
    if plan.estimate is not None:
        yield "model", model_text(plan.estimate)


def _runtime_rows(plan: Plan, others: Sequence[UnderRuntime]) -> Iterator[tuple[str, str]]:
    """The plan's runtime if nobody named one, and the same layout under others."""
    if not is_open(plan.job) or plan.estimate is None:
        return
    yield "planned for", open_text(plan.job)
    if text := elsewhere_text(others):
        yield "elsewhere", f"{text} (--runtimes all: a table)"


def _figures(plan: Plan) -> Iterator[tuple[str, str]]:
    """Step time with its parts and why they may be wrong, speed, and how many checks passed."""
    time = plan.estimate.time if plan.estimate else ""
    for name, text in main_figures(plan):
        yield name, text
        if name == "step time" and not isinstance(time, str):
            parts = time.parts().items()
            yield "parts", ", ".join(f"{part} {seconds_text(s)}" for part, s in parts if s)
            if time.extrapolates:
                yield "extrapolated", "; ".join(time.extrapolates)
            if plan.estimate and plan.estimate.measure_next:
                yield "measure next", plan.estimate.measure_next
    passed = sum(check.status == "ok" for check in plan.checks)
    others = sum(check.status != "ok" and check.rule != "memory-fits" for check in plan.checks)
    noted = f", {plural(others, 'warning')} below" if others else ""
    yield "checks", f"✓ {passed} passed{noted}"


def _warnings(plan: Plan) -> Iterator[Sentence]:
    """Every check that did not pass, with its hint; for memory the hint alone."""
    for check in plan.checks:
        if check.rule == "memory-fits" and check.status != "ok":
            yield Sentence(check.hint or "", "hint")
        elif check.status != "ok":
            yield Sentence(f"{check.rule}: {_check_text(check)}", "warning" if check.status == "warning" else "refused")


def _check_text(check: Check) -> str:
    return check.message + (f" → {check.hint}" if check.hint else "")


# Fields of StageMemory that add up to what the device shows, and what a reader calls them.
MEMORY_PARTS = {
    "parameter_bytes": "weights",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activation_bytes": "activations",
    "temporary_bytes": "temporary",
    "slack_bytes": "reserve",
    "context_bytes": "libraries",
    "communicator_bytes": "communicators",
}
MEANS = (
    "States: weights, gradients and optimizer. Temporary: what exists only while a layer is computed or a message is "
    "sent, buffers that the training software keeps, and workspaces of matrix libraries (`mpctl explain JOB memory` "
    "lists them). Reserve: what the allocator holds beyond that. Libraries: the context of the device's own libraries. "
    "Communicators: buffers of process groups."
)
NEAR = 4  # a limit that is this many times what is needed is not drawn


class MemoryRow(NamedTuple):
    """The memory of stages first to last, which share a row."""

    first: int
    last: int
    layers: str
    stages: Sequence[StageMemory]

    def counts(self) -> str:
        """Parameters of a rank, from least to most."""
        counts = sorted({stage.parameters for stage in self.stages})
        return "-".join(count_text(count) for count in dict.fromkeys((counts[0], counts[-1])))


def _bytes(title: str, field: str, *, is_wide: bool = False) -> Column:
    def text(row: MemoryRow) -> str:
        sizes = [getattr(stage, field) for stage in row.stages]
        return bytes_span_text(min(sizes), max(sizes))

    return Column(title, text, is_wide=is_wide)


STATES, HELD, BEYOND = (list(MEMORY_PARTS)[span] for span in (slice(3), slice(3, 5), slice(5, None)))
MEMORY = (
    Column("stage", lambda row: span_text(row.first, row.last), left=True),
    Column("layers", lambda row: row.layers, left=True),
    Column("params", MemoryRow.counts),
    *(_bytes(MEMORY_PARTS[field], field, is_wide=True) for field in STATES),
    _bytes("states", "state_bytes"),
    *(_bytes(MEMORY_PARTS[field], field) for field in HELD),
    _bytes("allocated", "allocated_bytes", is_wide=True),
    *(_bytes(MEMORY_PARTS[field], field, is_wide=True) for field in BEYOND),
    _bytes("on device", "device_bytes"),
)


def memory_parts(plan: Plan, estimate: Estimate, *, full: bool) -> Iterator[Part]:
    """A bar for each stage under the device's memory less headroom, and all sizes as a table; like stages
    share a row, unless full."""
    stages, limit = estimate.memory, plan.job.cluster.usable_bytes
    heaviest = max(stage.device_bytes for stage in stages)
    fullest = next(stage.stage for stage in stages if stage.device_bytes == heaviest)
    spans = [(at, at) for at in range(len(stages))] if full else fold_ends(len(stages), fullest)
    rows = [MemoryRow(a, b, _layers(estimate.layout, a, b), stages[a : b + 1]) for a, b in spans]
    drawn = limit if limit is not None and heaviest > limit / NEAR else None
    bars = []
    for row in rows:
        if row.first == row.last:
            (stage,) = row.stages
            over = " ✗ over" * (drawn is not None and stage.device_bytes > drawn)
            sizes = [getattr(stage, field) for field in MEMORY_PARTS]
            bars.append(Bar(f"stage {row.first}", sizes, f"{bytes_text(stage.device_bytes)}{over}"))
    yield Section("memory", "Memory")
    names = tuple(MEMORY_PARTS.values())
    yield Bars("", names, bars, bytes_text, 1.04 * max(heaviest, drawn or 0), drawn)
    more = len(stages) - len(bars)
    yield Sentence(
        _limit_text(limit, heaviest, drawn is not None) + f" {plural(more, 'more stage')} in the table." * bool(more),
        "note",
        "page",
    )
    yield DataTable("Memory of one rank, by stage, at its peak", MEMORY, rows)
    yield Sentence(MEANS, "note", "page")


def _limit_text(limit: int | None, heaviest: int, is_drawn: bool) -> str:
    if limit is None:
        return "No device is named, so there is no limit to draw."
    if not is_drawn:
        times = f"{limit / heaviest:,.0f} times what the fullest rank needs"
        return f"A job may take {bytes_text(limit)}, {times}, so the limit is not drawn."
    verdict = "fits" if heaviest <= limit else "does not fit"
    return (
        f"The dashed line is the device's memory less headroom, {bytes_text(limit)}: the "
        f"fullest rank's {bytes_text(heaviest)} {verdict}."
    )


SHOWN_ACTIONS = 12
SCHEDULE = ("stage", "first actions", "busy", "bubble", "in flight", "ends")


def _schedule(plan: Plan, estimate: Estimate) -> Iterator[Part]:
    """The timeline of a step, played with the estimate's seconds, and what each stage does and waits."""
    from mpctl.model.pipeline.schedule.orders import show
    from mpctl.plan.estimate.timeline import find_step_line

    step = find_step_line(estimate.layout)
    yield Section("schedule", "Schedule")
    if isinstance(step, str):
        yield Sentence(f"Not drawn: {step}.", "note", "page")
        return
    yield Picture(drawn=lambda: _timeline(plan, step, estimate.step_seconds), on="page")
    line, rows = step.line, []
    for stage, order in enumerate(line.orders):
        shares = (f"{share / (line.makespan or 1):.1%}" for share in (line.busy[stage], line.idle[stage]))
        actions = show(order[:SHOWN_ACTIONS]) + " …" * (len(order) > SHOWN_ACTIONS)
        rows.append((str(stage), actions, *shares, str(line.in_flight[stage]), seconds_text(line.ends[stage][-1])))
    title = "What each stage does and waits; in flight: micro batches held at once"
    yield table_of(title, SCHEDULE, rows, left=SCHEDULE[:2], fold="both")


def _timeline(plan: Plan, step: StepLine, total: float | None) -> Iterable[Raw]:
    from mpctl.render.markup import el
    from mpctl.render.page import scrolling
    from mpctl.render.plan_svg import timeline_title
    from mpctl.render.svg_timeline import StepPicture

    picture = StepPicture.of(step)
    words = "Numbers are micro batches (micro batch.chunk where a stage has several chunks)."
    if not picture.scale.is_whole:
        words += " The stretch marked … is left out: the stages repeat the same pattern in it."
    if total is not None and total > step.seconds:
        rest = seconds_text(total - step.seconds)
        words += f" The step ends {rest} later, with gradients over dp_cp and the optimizer."
    return (
        el("p", f"{timeline_title(plan, step)}."),
        scrolling(picture.element(), "Timeline of the schedule"),
        el("p", words, class_="note"),
    )


def _time(estimate: Estimate) -> Iterator[Part]:
    """A bar of the step's parts, and each in words and seconds."""
    from mpctl.plan.estimate.step import PARTS

    time = estimate.time
    yield Section("time", "Step time")
    if isinstance(time, str):
        yield Sentence(f"Not estimated: {time}.", "note", "page")
        return
    seconds = time.parts()
    parts = [part for part in PARTS if seconds.get(part.name)]
    bar = Bar("", [seconds[part.name] for part in parts])
    yield Bars("", [part.name for part in parts], [bar], seconds_text, time.total)
    rows = [
        (part.name, part.meaning, seconds_text(seconds[part.name]), f"{seconds[part.name] / time.total:.1%}")
        for part in parts
    ]
    columns = ("part", "what", "seconds", "share")
    yield table_of("Step time by part", columns, rows, left=columns[:2], fold="terminal")


def print_rank(document: RankDocument) -> None:
    """One rank on stdout: its node and coordinates, its layers, and the groups that it is in."""
    print_parts(_rank_parts(document))


def _rank_parts(document: RankDocument) -> Iterator[Part]:
    coords = ", ".join(f"{axis} {index}" for axis, index in document["coords"].items())
    yield Sentence(
        f"rank {document['rank']} of {document['world_size']}: node {document['node']}, "
        f"local rank {document['local_rank']}; {coords}",
        "title",
    )
    if "layers" in document:
        yield Sentence(f"layers {stage_layers_text(document['layers'], document.get('stacks'))}")
    for tensor, parts in document.get("tensor_blocks", {}).items():
        spans = (f"{dim} {span_text(first, stop - 1)}" for dim, (first, stop) in parts.items())
        yield Sentence(f"{tensor}: {', '.join(spans)}")
    rows = [(kind, str(len(group)), members_text(group, whole=True)) for kind, group in document["groups"].items()]
    yield table_of("", ("group", "size", "members"), rows, left=("group", "members"))


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
