"""Frames around the nodes of a picture: the NVLink domain and the networks above that they lie in.

Pieces flow from left to right in rows; a frame holds those whose first rank lies in its network,
and frames of a level lie in those of the level above. Two nodes of 4 in a domain of 8, in rows of
two: one frame with both, its title above them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from mpctl.layout.link_levels import LinkLevel, shown_levels
from mpctl.planning.plan import Plan
from mpctl.planning.summary import over_text
from mpctl.render.markup import Raw, el, join, number
from mpctl.topology import Topology

GAP, PAD, TITLE = 10, 8, 22
MOST_FRAMES = 32  # of a level; more are told in words alone


class Drawn(NamedTuple):
    """A drawing of the ranks from `first` on, with its size."""

    first: int
    drawn: Raw
    width: float
    height: float


def framed_levels(plan: Plan, topology: Topology, ranks: int) -> list[LinkLevel]:
    """The levels to frame, outermost first. ranks: of a piece, which no frame may cut."""
    shown = shown_levels(plan.job.cluster, topology)
    networks = [(level, -(-topology.world_size // level.ranks)) for level in shown]
    return [
        level for at, (level, count) in enumerate(networks)
        if level.ranks % ranks == 0 and count <= MOST_FRAMES
        and (count > 1 or (at == 0 and level.ranks > topology.gpus_per_node))
    ][::-1]  # fmt: skip


def nested(levels: Sequence[LinkLevel], pieces: Sequence[Drawn], width: float) -> Drawn:
    """The pieces in rows, in a frame for each network of the levels, outermost first."""
    if not levels:
        return _flow(pieces, width)
    level, *inner = levels
    groups = groupby(pieces, key=lambda piece: piece.first // level.ranks)
    frames = (
        _frame(level_title(level, at), nested(inner, list(group), width - 2 * PAD))
        for at, group in groups
    )
    return _flow(list(frames), width)


def level_title(level: LinkLevel, at: int) -> str:
    """`NVLink domain 3` or `pod 1, 1:4 oversubscribed`."""
    return f"{level.name} {at}{over_text(level)}"


def _frame(title: str, inside: Drawn) -> Drawn:
    width = max(inside.width, 7.0 * len(title)) + 2 * PAD
    height = inside.height + TITLE + PAD
    drawn = join([
        el("rect", width=number(width), height=number(height), rx=8, class_="box level"),
        el("text", title, x=PAD, y=15, class_="dim"),
        el("g", inside.drawn, transform=f"translate({PAD} {TITLE})"),
    ])  # fmt: skip
    return Drawn(inside.first, drawn, width, height)


def _flow(pieces: Sequence[Drawn], width: float) -> Drawn:
    """The pieces from left to right, in as many rows as the width asks for."""
    placed = list(_places(pieces, width))
    drawn = join(
        el("g", piece.drawn, transform=f"translate({number(x)} {number(y)})")
        for piece, x, y in placed
    )
    right = max(x + piece.width for piece, x, _ in placed)
    return Drawn(pieces[0].first, drawn, right, max(y + piece.height for piece, _, y in placed))


def _places(pieces: Sequence[Drawn], width: float) -> Iterator[tuple[Drawn, float, float]]:
    x = y = high = 0.0
    for piece in pieces:
        if x and x + piece.width > width:
            x, y, high = 0.0, y + high + GAP, 0.0
        yield piece, x, y
        x, high = x + piece.width + GAP, max(high, piece.height)
