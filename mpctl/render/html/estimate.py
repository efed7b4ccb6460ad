"""The sections of a plan's estimate: schedule, memory by stage, step time by part, traffic.

The schedule is played with the estimate's seconds. In the picture of traffic a square's side grows
with the logarithm of its bytes, so that it is read without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log2
from typing import TYPE_CHECKING

from mpctl.core.topology import Topology
from mpctl.core.units import bytes_text, count_text, plural, seconds_text
from mpctl.model.pipeline.schedule.orders import show
from mpctl.plan.estimate.job import Estimate
from mpctl.plan.estimate.step import PARTS
from mpctl.plan.estimate.timeline import StepLine
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.summary import plan_summary, rate_figures
from mpctl.plan.planning.traffic import RankTraffic, axis_of, dispatch_levels, rank_traffic, traffic_axes
from mpctl.render.fold import fold, layers_text
from mpctl.render.html.frame import Share, bar, details, legend, note, scrolling, section, table
from mpctl.render.markup import Raw, el, number
from mpctl.render.plan_svg import timeline_title
from mpctl.render.svg_timeline import WIDTH, Picture
from mpctl.render.svg_timeline import legend as svg_legend

if TYPE_CHECKING:
    from mpctl.plan.estimate.memory import StageMemory
    from mpctl.plan.estimate.step import StepTime


SHOWN_ACTIONS = 12


def schedule_section(plan: Plan, step: StepLine | str, total: float | None) -> Raw:
    """The section "Schedule": the timeline of a step and, as a table, what each stage waits.

    step: the played step, or in words why there is none; total: seconds of the whole step.
    """
    if isinstance(step, str):
        return section("schedule", "Schedule", note(f"Not drawn: {step}."))
    picture = Picture.of(step)
    drawn = el(
        "svg",
        el("title", picture.label),
        el("g", svg_legend(step)),
        el("g", picture.draw(), transform="translate(0 20)"),
        viewBox=f"0 0 {WIDTH + 2} {picture.height + 20}",
        role="img",
        aria_label=picture.label,
        class_="timeline",
    )
    return section(
        "schedule",
        "Schedule",
        el("p", f"{timeline_title(plan, step)}."),
        scrolling(drawn, "Timeline of the schedule"),
        note(*_notes(step, picture, total)),
        details("Schedule as a table", _schedule_table(step)),
    )


def _notes(step: StepLine, picture: Picture, total: float | None) -> list[str]:
    sentences = ["Numbers are micro batches (micro batch.chunk where a stage has several chunks)."]
    if not picture.scale.is_whole:
        sentences.append(" The stretch marked … is left out: the stages repeat the same pattern in it.")
    if total is not None and total > step.seconds:
        rest = seconds_text(total - step.seconds)
        last = "gradients over dp_cp and the optimizer"
        sentences.append(f" The step ends {rest} later, with {last}.")
    return sentences


def _schedule_table(step: StepLine) -> Raw:
    line = step.line
    whole = line.makespan or 1
    rows = [
        (
            f"stage {stage}",
            show(order[:SHOWN_ACTIONS]) + (" …" * (len(order) > SHOWN_ACTIONS)),
            f"{busy / whole:.1%}",
            f"{idle / whole:.1%}",
            in_flight,
            seconds_text(ends[-1]),
        )
        for stage, (order, busy, idle, in_flight, ends) in enumerate(
            zip(line.orders, line.busy, line.idle, line.in_flight, line.ends, strict=True)
        )
    ]
    columns = ("stage", "first actions", "busy", "bubble", "in flight", "ends")
    return table("What each stage does and waits; in flight: micro batches held at once", columns, rows, left=2)


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
    "Temporary: what exists only while a layer is computed or a message is sent, buffers that the "
    "training software keeps, and workspaces of matrix libraries (--explain memory lists them). "
    "Reserve: what the allocator holds beyond that. Libraries: the context of the device's own "
    "libraries. Communicators: buffers of process groups. The first five are allocated."
)
SHOWN, ENDS, NEAR = 16, (8, 4), 4


def memory_section(plan: Plan, stages: Sequence[StageMemory]) -> Raw:
    """The section "Memory": a bar for each stage under the device's memory less headroom, and all
    sizes as a table."""
    limit = plan.job.cluster.usable_bytes
    heaviest = max(stage.device_bytes for stage in stages)
    is_near = limit is not None and heaviest > limit / NEAR
    whole = 1.04 * max(heaviest, limit if is_near and limit else 0)
    drawn = limit if is_near else None
    rows = [_row(stage, whole, drawn) for stage in _drawn(stages)]
    left_out = len(stages) - len(rows)
    more = f" {plural(left_out, 'more stage')} in the table." if left_out else ""
    return section(
        "memory",
        "Memory of one rank, by stage",
        legend(MEMORY_PARTS.values()),
        el("ul", *rows, class_="bars"),
        note(_limit(limit, heaviest, is_near), more),
        note(MEANS),
        details("Memory as a table", _memory_table(plan, stages)),
    )


def _drawn(stages: Sequence[StageMemory]) -> list[StageMemory]:
    """All of a few stages; of many the first, the last and the fullest."""
    if len(stages) <= SHOWN:
        return list(stages)
    fullest = max(stages, key=lambda stage: stage.device_bytes).stage
    front, back = ENDS
    shown = {*range(front), fullest, *range(len(stages) - back, len(stages))}
    return [stages[stage] for stage in sorted(shown)]


def _limit(limit: int | None, heaviest: int, is_drawn: bool) -> str:
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


def _shares(stage: StageMemory) -> list[Share]:
    sizes = ((name, getattr(stage, key)) for key, name in MEMORY_PARTS.items())
    return [Share(name, size, bytes_text(size)) for name, size in sizes]


def _row(stage: StageMemory, whole: float, limit: int | None) -> Raw:
    is_over = limit is not None and stage.device_bytes > limit
    total = bytes_text(stage.device_bytes) + (" ✗ over" if is_over else "")
    return el("li", el("span", f"stage {stage.stage}"), bar(_shares(stage), whole, limit=limit), el("span", total))


def _memory_table(plan: Plan, stages: Sequence[StageMemory]) -> Raw:
    spans = plan.stages or ()
    rows = [
        (
            f"stage {s.stage}",
            layers_text(spans[s.stage]) if spans else "",
            count_text(s.parameters),
            *(share.text for share in _shares(s)),
            bytes_text(s.allocated_bytes),
            bytes_text(s.device_bytes),
        )
        for s in stages
    ]
    names = MEMORY_PARTS.values()
    columns = ("stage", "layers", "parameters", *names, "allocated", "on the device")
    return table("Bytes on one rank of each stage", columns, rows, left=2)


def time_section(plan: Plan, time: StepTime | str) -> Raw:
    """The section "Step time": a bar of the step's parts, and each in words and seconds."""
    if isinstance(time, str):
        return section("time", "Step time", note(f"Not estimated: {time}."))
    seconds = time.parts()
    parts = [part for part in PARTS if seconds.get(part.name)]
    shares = [Share(p.name, seconds[p.name], seconds_text(seconds[p.name])) for p in parts]
    band = f"{seconds_text(time.low)} to {seconds_text(time.high)}"
    rate = "; ".join(f"{name} {text}" for name, text in rate_figures(plan_summary(plan)))
    rows = [
        (part.name, part.meaning, share.text, f"{share.size / time.total:.1%}")
        for part, share in zip(parts, shares, strict=True)
    ]
    return section(
        "time",
        "Step time",
        el("p", el("strong", seconds_text(time.total)), f" a step (9 of 10 runs: {band}). {rate}."),
        note(f"Extrapolated: {'; '.join(time.extrapolates)}.") if time.extrapolates else "",
        legend(part.name for part in parts),
        el("div", bar(shares, time.total), class_="one"),
        table("Step time by part", ("part", "what", "seconds", "share"), rows, left=2),
    )


DRAWN_RANKS, SHOWN_STAGES, LISTED = 64, 64, 40


def traffic_section(plan: Plan, estimate: Estimate, topology: Topology) -> Raw:
    """The section "Traffic": bytes between ranks as squares, of a small world, and by stage and
    axis."""
    drawn, axes = list[Raw](), traffic_axes(estimate)
    if 1 < topology.world_size <= DRAWN_RANKS:
        traffic, world = rank_traffic(estimate, topology), topology.world_size
        drawn = [_squares(traffic, world, axes), legend(axes), _pairs_table(traffic, axes)]
    return section(
        "traffic",
        "Traffic of one step",
        *drawn,
        note("Bytes of the messages that one rank of each stage takes part in, by axis."),
        _by_stage(estimate, axes),
        *_dispatch(plan, estimate, topology),
    )


def _dispatch(plan: Plan, estimate: Estimate, topology: Topology) -> list[Raw]:
    """The bytes that are sent to experts by the level of links that they cross, as a bar and a
    table; nothing where none are."""
    levels = dispatch_levels(estimate, plan.job.cluster, topology)
    if not levels:
        return []
    shares = [Share(level.name, level.bytes, bytes_text(level.bytes)) for level in levels]
    rows = [(s.name, f"{level.share:.1%}", s.text) for s, level in zip(shares, levels, strict=True)]
    return [
        el("h3", "Tokens sent to experts, by the link that they cross"),
        legend(share.name for share in shares),
        el("div", bar(shares, sum(share.size for share in shares)), class_="one"),
        table(
            "Dispatch and combine of one step, of a rank of the stage that sends most; routing is taken as random",
            ("stays within", "share", "bytes"),
            rows,
        ),
    ]


def _squares(traffic: RankTraffic, world: int, axes: Sequence[str]) -> Raw:
    cell = max(10, min(26, 640 // world))
    edge = 34
    most = max((sum(parts.values()) for parts in traffic.values()), default=1)
    squares = [_square(pair, parts, most, cell, edge, axes) for pair, parts in sorted(traffic.items()) if parts]
    every = 1 if cell >= 20 else 4 if cell >= 12 else 8
    ticks = [
        el("text", rank, x=x, y=y, text_anchor=anchor)
        for rank in range(0, world, every)
        for x, y, anchor in (
            (edge - 5, edge + rank * cell + cell / 2 + 4, "end"),
            (edge + rank * cell + cell / 2, edge - 6, "middle"),
        )
    ]
    side = edge + world * cell + 2
    label = f"Bytes between {world} ranks: rows send, columns receive"
    grid = el("path", d="".join(_lines(world, cell, edge)), class_="grid")
    drawn = el(
        "svg",
        el("title", label),
        grid,
        *ticks,
        *squares,
        viewBox=f"0 0 {side} {side}",
        width=side,
        height=side,
        role="img",
        aria_label=label,
        class_="matrix",
    )
    caption = f"{label}. The largest square is {bytes_text(most)}."
    return el("figure", scrolling(drawn, label), el("figcaption", caption))


def _lines(world: int, cell: int, edge: int) -> Iterator[str]:
    for at in range(0, world + 1, 1 if world <= 16 else 8):
        offset, length = edge + at * cell, world * cell
        yield f"M{edge} {offset}h{length}M{offset} {edge}v{length}"


def _square(
    pair: tuple[int, int], parts: Mapping[str, float], most: float, cell: int, edge: int, axes: Sequence[str]
) -> Raw:
    """Coloured by the axis that sends most; smallest where it is a millionth of the largest."""
    whole = sum(parts.values())
    side = (cell - 2) * max(0.2, 1 + log2(whole / most) / 25) if whole else 0.0
    x, y = (edge + at * cell + (cell - side) / 2 for at in (pair[1], pair[0]))
    axis = max(parts, key=lambda name: parts[name])
    title = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    return el(
        "rect",
        el("title", f"{pair[0]} → {pair[1]}: {title}"),
        x=number(x),
        y=number(y),
        width=number(side),
        height=number(side),
        class_=f"s s{axes.index(axis)}",
    )


def _pairs_table(traffic: RankTraffic, axes: Sequence[str]) -> Raw:
    largest = sorted(traffic.items(), key=lambda item: -sum(item[1].values()))
    rows = [
        (f"{sender} → {receiver}", *(bytes_text(parts.get(axis, 0)) for axis in axes))
        for (sender, receiver), parts in largest[:LISTED]
    ]
    caption = f"Bytes from rank to rank, the largest {len(rows)} of {len(traffic)} pairs"
    return details("Traffic between ranks as a table", table(caption, ("ranks", *axes), rows))


def _by_stage(estimate: Estimate, axes: Sequence[str]) -> Raw:
    """A row for each run of stages that send the same."""
    sent = []
    for messages in estimate.messages:
        sums = dict.fromkeys(axes, 0)
        for message in messages:
            sums[axis_of(message)] += message.bytes * message.count
        sent.append((tuple(sums.values()), sum(m.count for m in messages)))
    most = max((size for sums, _ in sent for size in sums), default=0) or 1
    rows = [
        (_stages(first, last), *(_shaded(size, most) for size in sent[first][0]), f"{sent[first][1]:,}")
        for first, last in fold(sent)[:SHOWN_STAGES]
    ]
    return table("Bytes of one rank, by axis", ("stage", *axes, "messages"), rows)


def _stages(first: int, last: int) -> str:
    return f"stage {first}" if first == last else f"stages {first} to {last}"


def _shaded(size: float, most: float) -> Raw:
    width = number(100 * size / most)
    return el("span", bytes_text(size) if size else "–", class_="meter", style=f"--w:{width}%")
