"""Who sends how much to whom in a step, by rank where there are few, and by stage and axis.

Between ranks every collective counts as a ring: each rank sends its next 2 (t-1)/t of an all-reduce
and (t-1)/t of a gather or a scatter; a library may choose a tree for small ones. A square's side
grows with the logarithm of its bytes, so that it is read without colour.

By hand, an all-reduce of 8 MiB by 2 ranks: each sends the other 8 MiB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import log2

from mpctl.axes import AXIS_NAMES
from mpctl.estimate.job import Estimate
from mpctl.estimate.message import MessageCount
from mpctl.estimate.timeline import handed_over
from mpctl.planning.plan import Plan
from mpctl.render.fold import fold
from mpctl.render.html.parts import details, legend, note, scrolling, section, table
from mpctl.render.markup import Raw, el, number
from mpctl.topology import Topology
from mpctl.units import bytes_text

DRAWN_RANKS, SHOWN_STAGES, LISTED = 64, 64, 40
AXES = (*AXIS_NAMES, "world")
Pairs = dict[tuple[int, int], dict[str, float]]  # (sender, receiver) -> bytes by axis


def traffic_section(plan: Plan, topology: Topology, estimate: Estimate) -> Raw:
    drawn = []
    if 1 < topology.world_size <= DRAWN_RANKS:
        found = rank_pairs(plan, topology, estimate)
        drawn = [_squares(found, topology.world_size), legend(AXES), _pairs_table(found)]
    return section(
        "traffic", "Traffic of one step", *drawn,
        note("Bytes of the messages that one rank of each stage takes part in, by axis."),
        _by_stage(estimate),
    )  # fmt: skip


def rank_pairs(plan: Plan, topology: Topology, estimate: Estimate) -> Pairs:
    found: Pairs = defaultdict(lambda: defaultdict(float))
    for rank in range(topology.world_size):
        stage = topology.coords(rank)["pp"]
        for message in estimate.messages[stage]:
            if message.kind != "send":
                peer, sent = _ring(topology, estimate, rank, message)
                found[rank, peer][message.axis] += sent
    m = plan.job.num_microbatches
    for (sender, receiver), size in handed_over(estimate.layout).items():
        for rank in topology.group(0, *(axis for axis in AXIS_NAMES if axis != "pp")):
            at = [rank + stage * topology.strides["pp"] for stage in (sender.stage, receiver.stage)]
            if size:
                found[at[0], at[1]]["pp"] += m * size
    return found


def _ring(
    topology: Topology, estimate: Estimate, rank: int, message: MessageCount
) -> tuple[int, float]:  # fmt: skip
    """The next of a rank in its group, and the bytes that go there."""
    axes = {"dp": ("dp", "cp"), "world": AXIS_NAMES}.get(message.axis, (message.axis,))
    group = list(topology.group(rank, *axes))
    if message.what == "shared parameters":
        holders = [s for s, own in enumerate(estimate.messages) if message in own]
        group = [group[stage] for stage in holders]
    phases = 2 if message.kind == "all_reduce" else 1
    share = phases * (len(group) - 1) / len(group)
    after = group[(group.index(rank) + 1) % len(group)]
    return after, share * message.bytes * message.count


def _squares(found: Pairs, world: int) -> Raw:
    cell = max(10, min(26, 640 // world))
    edge = 34
    most = max((sum(parts.values()) for parts in found.values()), default=1)
    squares = [
        _square(pair, parts, most, cell, edge) for pair, parts in sorted(found.items()) if parts
    ]
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
    drawn = el("svg", el("title", label), grid, *ticks, *squares, viewBox=f"0 0 {side} {side}",
               width=side, height=side, role="img", aria_label=label, class_="matrix")  # fmt: skip
    said = f"{label}. The largest square is {bytes_text(most)}."
    return el("figure", scrolling(drawn, label), el("figcaption", said))


def _lines(world: int, cell: int, edge: int) -> Iterator[str]:
    for at in range(0, world + 1, 1 if world <= 16 else 8):
        place, long = edge + at * cell, world * cell
        yield f"M{edge} {place}h{long}M{place} {edge}v{long}"


def _square(
    pair: tuple[int, int], parts: Mapping[str, float], most: float, cell: int, edge: int
) -> Raw:  # fmt: skip
    """Coloured by the axis that sends most; smallest where it is a millionth of the largest."""
    whole = sum(parts.values())
    side = (cell - 2) * max(0.2, 1 + log2(whole / most) / 25) if whole else 0.0
    x, y = (edge + at * cell + (cell - side) / 2 for at in (pair[1], pair[0]))
    axis = max(parts, key=lambda name: parts[name])
    said = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    return el("rect", el("title", f"{pair[0]} → {pair[1]}: {said}"), x=number(x), y=number(y),
              width=number(side), height=number(side), class_=f"s s{AXES.index(axis)}")  # fmt: skip


def _pairs_table(found: Pairs) -> Raw:
    largest = sorted(found.items(), key=lambda item: -sum(item[1].values()))
    rows = [
        (f"{sender} → {receiver}", *(bytes_text(parts.get(axis, 0)) for axis in AXES))
        for (sender, receiver), parts in largest[:LISTED]
    ]
    caption = f"Bytes from rank to rank, the largest {len(rows)} of {len(found)} pairs"
    return details("Traffic between ranks as a table", table(caption, ("ranks", *AXES), rows))


def _by_stage(estimate: Estimate) -> Raw:
    """A row for each run of stages that send the same."""
    sent = []
    for messages in estimate.messages:
        sums = dict.fromkeys(AXES, 0)
        for message in messages:
            sums[message.axis] += message.bytes * message.count
        sent.append((tuple(sums.values()), sum(m.count for m in messages)))
    most = max((size for sums, _ in sent for size in sums), default=0) or 1
    rows = [
        (_stages(first, last), *(_shaded(size, most) for size in sent[first][0]),
         f"{sent[first][1]:,}")
        for first, last in fold(sent)[:SHOWN_STAGES]
    ]  # fmt: skip
    return table("Bytes of one rank, by axis", ("stage", *AXES, "messages"), rows)


def _stages(first: int, last: int) -> str:
    return f"stage {first}" if first == last else f"stages {first} to {last}"


def _shaded(size: float, most: float) -> Raw:
    width = number(100 * size / most)
    return el("span", bytes_text(size) if size else "–", class_="meter", style=f"--w:{width}%")
