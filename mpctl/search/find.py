"""Branch and bound over a space of layouts: the fastest ones, and the fastest under less memory.

Shapes, their families and those's layouts wait in one queue, the least bound first (bound.py). What
comes out is taken apart or, a single layout, estimated. A part is dropped where its bound is beyond
the worst of what is still looked for: the K best that fit the device, and on each `Rung` the best
that needs no more than a share of the device's memory. Of a family's memory the floor is what its
first stage needs where ZeRO shares the most; a larger micro batch never needs less. Ties go to less
memory, then to the layout's own order, so that the answer is the same every time.

The exhaustive way estimates every layout that passes the rules; tests hold the two against each
other on small spaces.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Literal, NamedTuple

from mpctl.planning.layout_settings import LayoutSettings
from mpctl.rules.validate import has_errors
from mpctl.search.bound import StepTimeBound
from mpctl.search.evaluate import LayoutEvaluator
from mpctl.search.space import AxesKey, LayoutFamily, SearchSpace

Objective = Literal["tokens", "memory"]
Progress = Callable[[str, int, int], None]
RUNGS = 4  # shares of the device's memory, in equal steps
REPORTED = 256  # parts taken from the queue between two reports
PARTS = 1000  # of the way that is reported


class EvaluatedLayout(NamedTuple):
    """A layout with its seconds a step and the bytes reserved on its fullest rank."""

    seconds: float
    bytes: int
    layout: LayoutSettings


@dataclass
class FoundLayouts:
    """points: the K best, best first; front: of those and of each rung, what nothing else beats in
    both seconds and bytes; seen: all that were estimated. is_complete: not interrupted."""

    points: list[EvaluatedLayout] = field(default_factory=list)
    front: list[EvaluatedLayout] = field(default_factory=list)
    is_complete: bool = True
    seen: list[EvaluatedLayout] = field(default_factory=list)

    @property
    def estimated(self) -> int:
        return len(self.seen)


@dataclass
class MemoryBudget:
    """The best so far of layouts of at most so many bytes."""

    limit: float
    keep: int
    by_bytes: bool = False
    points: list[EvaluatedLayout] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """Of what counts: nothing that is worse is wanted any more."""
        last = self.points[-1] if len(self.points) == self.keep else None
        return inf if last is None else last.bytes if self.by_bytes else last.seconds

    def _key(self, point: EvaluatedLayout) -> tuple[float, float, LayoutSettings]:
        return (point.bytes, point.seconds, point.layout) if self.by_bytes else point

    def wants(self, seconds: float, size: float) -> bool:
        return size <= self.limit and seconds <= self.worst

    def offer(self, point: EvaluatedLayout) -> None:
        """Of layouts that differ in their order alone the best is kept."""
        alike = point.layout._replace(order="")
        same = [own for own in self.points if own.layout._replace(order="") == alike]
        if point.bytes <= self.limit and not (same and same[0] <= point):
            self.points = [own for own in self.points if own not in same]
            insort(self.points, point, key=self._key)
            del self.points[self.keep :]


def find_layouts(
    space: SearchSpace,
    *,
    top: int = 5,
    rungs: int = RUNGS,
    objective: Objective = "tokens",
    exhaustive: bool = False,
    on_progress: Progress | None = None,
    engine: LayoutEvaluator | None = None,
) -> FoundLayouts:
    """The fastest layouts, or those of least memory. Raises MissingFigure where the device states
    no rate. Ctrl-C ends it with what was found so far."""
    search = BranchAndBound(space, engine or LayoutEvaluator(space), top, rungs)
    report = on_progress or _unreported
    try:
        if exhaustive:
            search.every()
        elif search.engine.least_share > search.leanest.limit:
            pass  # not even the states fit, however shared
        elif objective == "memory":
            search.least(report)
        else:
            search.run(report)
    except KeyboardInterrupt:
        search.found.is_complete = False
    return search.result(objective)


def _unreported(stage: str, done: int, total: int) -> None:
    """Where nobody watches."""


class BranchAndBound:
    def __init__(self, space: SearchSpace, engine: LayoutEvaluator, top: int, rungs: int) -> None:
        self.space, self.engine = space, engine
        self.floor, self.found = StepTimeBound(self.engine), FoundLayouts()
        device = space.job.cluster.device
        assert device is not None, "the engine asked for it"
        shares = [device.memory_bytes * share / rungs for share in range(rungs, 0, -1)]
        self.rungs = [MemoryBudget(limit, 1 if at else top) for at, limit in enumerate(shares)]
        self.leanest = MemoryBudget(device.memory_bytes, top, by_bytes=True)
        self.full: dict[tuple[object, ...], tuple[int, float]] = {}

    def run(self, report: Progress) -> None:
        queue: list[tuple[float, int, AxesKey | LayoutFamily | LayoutSettings]] = []
        shapes = list(self.space.shapes())
        for number, shape in enumerate(shapes):
            queue.append((self.floor.guess(shape), number, shape))
            if number % REPORTED == 0:
                report("bounds", number, len(shapes))
        heapify(queue)
        number, at, least = len(shapes), 0, queue[0][0] if queue else 0.0
        while queue:
            bound, _, part = heappop(queue)
            worst = max(rung.worst for rung in self.rungs)
            if bound > worst or bound == inf:
                break
            for below, child in self._below(bound, part):
                number += 1
                heappush(queue, (below, number, child))
            at += 1
            if at % REPORTED == 0 and least < worst < inf:  # how far bounds have come to meet it
                report("layouts", round(PARTS * (bound - least) / (worst - least)), PARTS)

    def _below(
        self, bound: float, part: AxesKey | LayoutFamily | LayoutSettings
    ) -> Iterator[tuple[float, LayoutFamily | LayoutSettings]]:
        """What a part is made of, as far as it is still wanted; a layout is estimated."""
        if isinstance(part, LayoutSettings):
            self._estimate(part, bound)
        elif isinstance(part, AxesKey):
            if not self._wants(self.floor.shape(part), 0.0):
                return
            for family in self.space.families(part):
                own = self.floor.family(family)
                if self._wants(own, self._least(family)):
                    yield own, family
        elif self._wants(bound, self._leanest(part)):
            whole = part.layout(0, "")
            least = {zero: self.engine.least_bytes(whole, zero) for zero in self._zeros(part)}
            zeros = [zero for zero, size in least.items() if self._wants(bound, size)]
            for own, layout in self.floor.members(part, bound, zeros):
                if self._wants(own, least[layout.zero]):
                    yield own, layout

    def _zeros(self, family: LayoutFamily) -> list[int]:
        return self.space.zeros(family.shape.dp * family.shape.group.cp)

    def _wants(self, seconds: float, size: float) -> bool:
        return any(rung.wants(seconds, size) for rung in self.rungs)

    def _least(self, family: LayoutFamily) -> float:
        """Bytes that a family like it, of a smaller micro batch, was found to need."""
        batch, size = self.full.get(self._alike(family), (0, 0))
        return size if family.shape.group.micro_batch_size >= batch else 0

    def _leanest(self, family: LayoutFamily) -> float:
        """Bytes that every layout of the family needs."""
        size, key = self._least(family), self._alike(family)
        if not self._wants(0.0, size):
            return size
        size = self.engine.least_bytes(family.layout(0, ""), max(self._zeros(family)))
        batch = family.shape.group.micro_batch_size
        if batch < self.full.get(key, (batch + 1, 0))[0] and not self._wants(0.0, size):
            self.full[key] = batch, size
        return size

    def _alike(self, family: LayoutFamily) -> tuple[object, ...]:
        (tp, cp, _, split, recompute), dp, pp, _ = family.shape
        return tp, cp, split, recompute, dp, pp, *family[1:]

    def _estimate(self, layout: LayoutSettings, bound: float) -> None:
        if not self._wants(bound, self.engine.least_bytes(layout, layout.zero)):
            return
        size = self.engine.reserved(layout)
        if self._wants(bound, size):
            self._take(layout, size, self.rungs)

    def _take(self, layout: LayoutSettings, size: int, rungs: list[MemoryBudget]) -> None:
        time = self.engine.time(layout)
        if time is not None and self._is_legal(layout):
            point = EvaluatedLayout(time.total, size, layout)
            self.found.seen.append(point)
            for rung in rungs:
                rung.offer(point)

    def _is_legal(self, layout: LayoutSettings) -> bool:
        return not has_errors(self.space.job_of(layout))

    def least(self, report: Progress) -> None:
        """By memory, smaller micro batches first: what is too much for one is so for larger."""
        shapes = sorted(self.space.shapes(), key=lambda shape: shape.group.micro_batch_size)
        rung, dropped = self.leanest, set[tuple[object, ...]]()
        for number, shape in enumerate(shapes):
            if number % REPORTED == 0:
                report("layouts", number, len(shapes))
            for family in self.space.families(shape):
                key = self._alike(family)
                if key in dropped:
                    continue
                if self._leanest(family) > min(rung.worst, rung.limit):
                    dropped.add(key)
                    continue
                for layout in self.space.members(family):
                    size = self.engine.reserved(layout)
                    if size <= min(rung.worst, rung.limit):
                        self._take(layout, size, [rung])

    def every(self) -> None:
        for layout in self.space.layouts():
            self._take(layout, self.engine.reserved(layout), [*self.rungs, self.leanest])

    def result(self, objective: Objective) -> FoundLayouts:
        self.found.points = (self.leanest if objective == "memory" else self.rungs[0]).points
        if objective == "memory":
            return self.found
        candidates = sorted({point for rung in self.rungs for point in rung.points})
        least: float = inf
        for point in candidates:
            if point.bytes < least:
                least = point.bytes
                self.found.front.append(point)
        return self.found
