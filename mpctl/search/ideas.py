"""Layouts of one idea, which a search answers with one row.

An estimate cannot tell layouts apart that differ by less than its own error, and users cannot
choose between five spellings of one layout. So a search looks for ideas: layouts with the same tp,
pp and tensor mode. Of an idea it keeps the layouts within ALIKE of the fastest one, and shows the
plainest of them (`cost_of_trouble`).

Between ideas the order is open below RANKING_ERROR. In the published sweeps (several layouts of
one model on one cluster, estimated by constants that had not seen the run;
benchmarks/accuracy.py), of the pairs of layouts whose estimates differ by less than that, six in
ten ran in the estimated order; of those that differ by more, nine of ten did. Where a band is
wide, because the runtime was never measured on such a device, so is what the order says:
WIDE_ERROR.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log2
from typing import NamedTuple

from mpctl.axes import DEFAULT_ORDER
from mpctl.planning.layout_settings import LayoutSettings

ALIKE = 0.01
RANKING_ERROR, WIDE_ERROR = 0.04, 0.1
WIDE_BAND = 2.0
"""From this ratio of a band's ends on, a band is wide."""
OPTIMISM = (0.01, 0.07)
"""By how much the fastest of several estimates is too fast beside the others of its sweep: the mean
over the sweeps of tuned software, and over those of nanotron's cluster, which nobody tuned."""
RECOMPUTE = {"none": 0.0, "selective": 1.0, "full": 2.0}
PLAIN_SCHEDULES, PLAIN_BALANCE = ("1f1b", "interleaved"), "even"


class Idea(NamedTuple):
    """What layouts of one row of an answer have in common."""

    tensor_mode: str
    tp: int
    pp: int


class EvaluatedLayout(NamedTuple):
    """A layout with its seconds a step and the bytes on the device of its fullest rank."""

    seconds: float
    bytes: int
    layout: LayoutSettings

    @property
    def idea(self) -> Idea:
        """The idea that it belongs to."""
        return Idea(self.layout.tensor_mode, self.layout.tp, self.layout.pp)


def cost_of_trouble(layout: LayoutSettings) -> float:
    """How much there is to a layout that a plainer one does without: each doubling of pp, cp, of
    chunks and of the micro batch, half of it for tp, recomputation, states sharded further, and
    whatever is not usual.

    >>> plain = LayoutSettings(4, 1, 32, 2, 4, "1f1b", "even", 1, "none", True, 1, "tp-cp-dp-pp")
    >>> cost_of_trouble(plain), cost_of_trouble(plain._replace(vpp=20, zero=2))
    (4.5, 8.321928094887362)
    """
    sizes = (layout.pp, layout.cp, layout.vpp, layout.micro_batch_size)
    unusual = (
        any(size & (size - 1) for size in sizes)
        + 2 * (layout.schedule not in PLAIN_SCHEDULES)
        + (layout.stage_balance != PLAIN_BALANCE)
        + (layout.order not in ("", DEFAULT_ORDER))
    )
    doublings = sum(log2(size) for size in sizes) + log2(layout.tp) / 2
    return doublings + RECOMPUTE[layout.recompute] + layout.zero / 2 + unusual


@dataclass(frozen=True)
class LayoutGroup:
    """Layouts of one idea that are as fast as each other. members: the fastest first."""

    members: tuple[EvaluatedLayout, ...]

    @property
    def face(self) -> EvaluatedLayout:
        """The plainest; of equally plain ones the fastest."""
        return min(self.members, key=lambda point: (cost_of_trouble(point.layout), point))

    @property
    def others(self) -> tuple[EvaluatedLayout, ...]:
        """The layouts of the group other than its face."""
        return tuple(point for point in self.members if point != self.face)


@dataclass
class BestIdeas:
    """The best so far of the layouts that need at most `limit` bytes: of the `count` ideas with the
    fastest layouts, those within ALIKE of each."""

    limit: float
    count: int
    ideas: dict[Idea, list[EvaluatedLayout]] = field(default_factory=dict)
    worst: float = inf  # seconds above which no layout is wanted

    def wants(self, seconds: float, size: float, idea: Idea | None = None) -> bool:
        """Whether a layout of at least so many seconds and bytes may be among the best; idea: its
        own, where it is known."""
        if size > self.limit or seconds > self.worst:
            return False
        known = self.ideas.get(idea) if idea else None
        return known is None or seconds <= known[0].seconds * (1 + ALIKE)

    def add(self, point: EvaluatedLayout) -> None:
        """Take the layout in if it is among the best; of layouts that differ in the order of their
        axes alone, the best one stays."""
        if point.bytes > self.limit:
            return
        unordered = point.layout._replace(order="")
        points = self.ideas.setdefault(point.idea, [])
        alike = [one for one in points if one.layout._replace(order="") == unordered]
        if alike and alike[0] <= point:
            return
        kept = [one for one in points if one not in alike]
        insort(kept, point)
        least = kept[0].seconds * (1 + ALIKE)
        self.ideas[point.idea] = [one for one in kept if one.seconds <= least]
        if len(self.ideas) >= self.count:
            fastest = sorted(points[0].seconds for points in self.ideas.values())
            self.worst = fastest[self.count - 1] * (1 + ALIKE)

    def groups(self) -> list[LayoutGroup]:
        """The best ideas, in the order of their faces' seconds."""
        every = sorted(self.ideas.values(), key=lambda points: points[0])[: self.count]
        return sorted((LayoutGroup(tuple(points)) for points in every), key=lambda g: g.face)


def plainest_first(groups: Sequence[LayoutGroup], band: float) -> list[LayoutGroup]:
    """The groups, fastest first; where the band of the first one is wide, those that the order
    cannot tell from it begin with the plainest. band: the ratio of its ends."""
    if not groups or band < WIDE_BAND:
        return list(groups)
    most = groups[0].face.seconds * (1 + WIDE_ERROR)
    near = [group for group in groups if group.face.seconds <= most]
    first = min(near, key=lambda group: (cost_of_trouble(group.face.layout), group.face))
    return [first, *(group for group in groups if group is not first)]
