"""Who sends how much to whom in a step, by rank where there are few, and by stage and axis.

A square's side grows with the logarithm of its bytes, so that it is read without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log2

from mpctl.estimate.job import Estimate
from mpctl.planning.traffic import AXES, RankTraffic, rank_traffic
from mpctl.render.fold import fold
from mpctl.render.html.parts import details, legend, note, scrolling, section, table
from mpctl.render.markup import Raw, el, number
from mpctl.topology import Topology
from mpctl.units import bytes_text

DRAWN_RANKS, SHOWN_STAGES, LISTED = 64, 64, 40


def traffic_section(estimate: Estimate, topology: Topology) -> Raw:
    """The section "Traffic": bytes between ranks as squares, of a small world, and by stage and
    axis."""
    drawn = []
    if 1 < topology.world_size <= DRAWN_RANKS:
        traffic = rank_traffic(estimate, topology)
        drawn = [_squares(traffic, topology.world_size), legend(AXES), _pairs_table(traffic)]
    return section(
        "traffic",
        "Traffic of one step",
        *drawn,
        note("Bytes of the messages that one rank of each stage takes part in, by axis."),
        _by_stage(estimate),
    )


def _squares(traffic: RankTraffic, world: int) -> Raw:
    cell = max(10, min(26, 640 // world))
    edge = 34
    most = max((sum(parts.values()) for parts in traffic.values()), default=1)
    squares = [
        _square(pair, parts, most, cell, edge) for pair, parts in sorted(traffic.items()) if parts
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
    caption = f"{label}. The largest square is {bytes_text(most)}."
    return el("figure", scrolling(drawn, label), el("figcaption", caption))


def _lines(world: int, cell: int, edge: int) -> Iterator[str]:
    for at in range(0, world + 1, 1 if world <= 16 else 8):
        offset, length = edge + at * cell, world * cell
        yield f"M{edge} {offset}h{length}M{offset} {edge}v{length}"


def _square(
    pair: tuple[int, int], parts: Mapping[str, float], most: float, cell: int, edge: int
) -> Raw:  # fmt: skip
    """Coloured by the axis that sends most; smallest where it is a millionth of the largest."""
    whole = sum(parts.values())
    side = (cell - 2) * max(0.2, 1 + log2(whole / most) / 25) if whole else 0.0
    x, y = (edge + at * cell + (cell - side) / 2 for at in (pair[1], pair[0]))
    axis = max(parts, key=lambda name: parts[name])
    title = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    return el("rect", el("title", f"{pair[0]} → {pair[1]}: {title}"), x=number(x), y=number(y),
              width=number(side), height=number(side), class_=f"s s{AXES.index(axis)}")  # fmt: skip


def _pairs_table(traffic: RankTraffic) -> Raw:
    largest = sorted(traffic.items(), key=lambda item: -sum(item[1].values()))
    rows = [
        (f"{sender} → {receiver}", *(bytes_text(parts.get(axis, 0)) for axis in AXES))
        for (sender, receiver), parts in largest[:LISTED]
    ]
    caption = f"Bytes from rank to rank, the largest {len(rows)} of {len(traffic)} pairs"
    return details("Traffic between ranks as a table", table(caption, ("ranks", *AXES), rows))


def _by_stage(estimate: Estimate) -> Raw:
    """A row for each run of stages that send the same."""
    sent = []
    for messages in estimate.messages:
        sums = dict.fromkeys(AXES, 0)
        for message in messages:
            axis = message.axis if message.axis in sums else "tp"
            sums[axis] += message.bytes * message.count
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
