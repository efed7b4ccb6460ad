"""The messages of a plan's step: of one block, between stages, by axis, from rank to rank.

In the picture of ranks a square's side grows with the logarithm of its bytes, so that it is read
without colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log2
from typing import TYPE_CHECKING

from mpctl.core.topology import Topology
from mpctl.core.units import bytes_text
from mpctl.plan.planning.plan import Plan
from mpctl.render.fold import fold, span_text
from mpctl.render.parts import Bar, Bars, Part, Picture, Section, Sentence, table_of

if TYPE_CHECKING:
    from mpctl.plan.estimate.job import Estimate
    from mpctl.plan.estimate.layer_messages import BlockTraffic, PartTraffic
    from mpctl.plan.planning.traffic import RankTraffic
    from mpctl.render.markup import Raw

DRAWN_RANKS, SHOWN_ROWS, LISTED = 64, 64, 40


def traffic_parts(plan: Plan, estimate: Estimate, topology: Topology) -> Iterator[Part]:
    """All messages of a step."""
    yield Section("traffic", "Traffic of one step", folded="Messages from rank to rank, of a block, by axis")
    yield from _by_rank(estimate, topology)
    for block in estimate.blocks:
        yield from _block(block) if block.mode == "1d" else _grid_block(block)
    yield from _pipeline(estimate, topology)
    yield from _by_axis(estimate)
    yield from _dispatch(plan, estimate, topology)


def _block(block: BlockTraffic) -> Iterator[Part]:
    """The messages of a block over tp, a row for each split layer."""
    columns, whole = ("parallel layer", "all-reduces", "volume", "bytes"), block.whole
    rows = [
        (name, str(part.all_reduces), f"{part.volume_phi:g} Φ", bytes_text(part.volume_bytes))
        for name, part in [*block.parts.items(), ("block", whole)]
    ]
    yield table_of(_title(block), columns, rows, left=columns[:1], has_sum=True)
    ring = f"a ring of {block.tp} sends {bytes_text(whole.ring_bytes_per_rank)} a rank"
    yield Sentence(f"Φ = {bytes_text(whole.phi_bytes)}, one micro batch's hidden states; {ring}", "note")


def _grid_block(block: BlockTraffic) -> Iterator[Part]:
    """A row for each axis of the grid and kind of collective of each part of a block."""
    columns = ("part", "axis", "collective", "count", "volume", "a rank sends")
    rows = []
    for name, part in block.parts.items():
        for at, sent in enumerate(part.by_kind()):
            first = sent.messages[0]
            rows.append(("" if at else name, first.axis, first.kind.replace("_", "-"), *_amounts(sent)))
    rows.append(("block", "", "", *_amounts(block.whole)))
    yield table_of(_title(block), columns, rows, left=columns[:3], has_sum=True)
    yield Sentence("one micro batch; of a broadcast or a reduce what a rank sends on the average", "note")


def _title(block: BlockTraffic) -> str:
    return f"Tensor-parallel traffic of one {f'{block.stack.name} block'.lstrip()}"


def _amounts(sent: PartTraffic) -> tuple[str, str, str]:
    """The number of collectives, their volume, and the bytes that a rank of a ring sends."""
    count = sum(message.count for message in sent.messages)
    return str(count), bytes_text(sent.volume_bytes), bytes_text(sent.ring_bytes_per_rank)


def _pipeline(estimate: Estimate, topology: Topology) -> Iterator[Part]:
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
    yield table_of("Pipeline traffic of one step", columns, rows, left=("stage", "nodes"))
    yield Sentence("shared: gradients of parameters that several stages hold, summed over them", "note")


def _by_axis(estimate: Estimate) -> Iterator[Part]:
    """A row for each run of stages that send the same."""
    from mpctl.plan.planning.traffic import axis_of, traffic_axes

    axes, sent = traffic_axes(estimate), []
    for messages in estimate.messages:
        sums = dict.fromkeys(axes, 0)
        for message in messages:
            sums[axis_of(message)] += message.bytes * message.count
        sent.append(
            (*(bytes_text(size) if size else "–" for size in sums.values()), f"{sum(m.count for m in messages):,}")
        )
    rows = [(span_text(first, last), *sent[first]) for first, last in fold(sent)[:SHOWN_ROWS]]
    columns = ("stage", *axes, "messages")
    title = "Bytes of the messages that one rank of each stage takes part in, by axis"
    yield table_of(title, columns, rows, left=columns[:1], fold="terminal")


def _dispatch(plan: Plan, estimate: Estimate, topology: Topology) -> Iterator[Part]:
    """The bytes that are sent to experts by the level of links that they cross; nothing where none are."""
    from mpctl.plan.planning.traffic import dispatch_levels

    levels = dispatch_levels(estimate, plan.job.cluster, topology)
    if not levels:
        return
    sizes = [level.bytes for level in levels]
    title = "Tokens sent to experts, by the link that they cross"
    yield Bars(title, [level.name for level in levels], [Bar("", sizes)], bytes_text, sum(sizes))
    rows = [(level.name, f"{level.share:.1%}", bytes_text(level.bytes)) for level in levels]
    columns = ("stays within", "share", "bytes")
    title = "Dispatch and combine of one step, of a rank of the stage that sends most; routing is taken as random"
    yield table_of(title, columns, rows, left=columns[:1], fold="terminal")


def _by_rank(estimate: Estimate, topology: Topology) -> Iterator[Part]:
    """The bytes between ranks of a small world."""
    from mpctl.plan.planning.traffic import rank_traffic, traffic_axes

    if not 1 < topology.world_size <= DRAWN_RANKS:
        return
    traffic, axes = rank_traffic(estimate, topology), traffic_axes(estimate)
    yield Picture(drawn=lambda: _squares(traffic, topology.world_size, axes), on="page")
    largest = sorted(traffic.items(), key=lambda item: -sum(item[1].values()))
    rows = [
        (f"{sender} → {receiver}", *(bytes_text(parts.get(axis, 0)) for axis in axes))
        for (sender, receiver), parts in largest[:LISTED]
    ]
    title = f"Bytes from rank to rank, the largest {len(rows)} of {len(traffic)} pairs"
    yield table_of(title, ("ranks", *axes), rows, left=("ranks",), fold="both")


def _squares(traffic: RankTraffic, world: int, axes: Sequence[str]) -> Iterable[Raw]:
    from mpctl.render.markup import el
    from mpctl.render.page import legend, scrolling

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
    drawn = el(
        "svg",
        el("title", label),
        el("path", d="".join(_lines(world, cell, edge)), class_="grid"),
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
    return el("figure", scrolling(drawn, label), el("figcaption", caption)), legend(axes)


def _lines(world: int, cell: int, edge: int) -> Iterator[str]:
    for at in range(0, world + 1, 1 if world <= 16 else 8):
        offset, length = edge + at * cell, world * cell
        yield f"M{edge} {offset}h{length}M{offset} {edge}v{length}"


def _square(
    pair: tuple[int, int], parts: Mapping[str, float], most: float, cell: int, edge: int, axes: Sequence[str]
) -> Raw:
    """Coloured by the axis that sends most; smallest where it is a millionth of the largest."""
    from mpctl.render.markup import el, number

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
