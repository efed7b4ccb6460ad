"""Branch and bound over a space of layouts: the fastest ones, and the fastest under less memory.

Axes, their families and the layouts of those (space.py) wait in one queue, the smallest bound first
(bound.py). An entry taken from it is split or, if it is a single layout, evaluated. An entry is
dropped where its bound is above the worst layout that is still wanted: those of the best classes
that fit the device and, for each smaller budget (a share of the device's memory), those of the best
class within it. The bound of a family's memory is what its first stage needs where ZeRO shards the
most; a larger micro batch never needs less. Ties go to less memory, then to the order of the layouts'
values, so that the answer is the same every time.

The exhaustive search evaluates every layout that passes the rules; tests compare the two on small
spaces.

Where a runtime overlaps experts' messages with the work of another micro batch (`moe_overlap`), a second step
tries that on the layouts of the best classes, and keeps what is faster for it.

Users cannot choose between five spellings of one layout. So a search looks for *classes*: layouts
with the same tp, pp, ep and tensor mode. Of a class it keeps the layouts within ALIKE of the fastest
one. In the best class the fastest stands for them, in others the plainest within AS_FAST of it: nobody
runs one chunk a layer for a tenth of a percent.

Seconds by which layouts are ordered include what a nearly full device costs in expectation (room.py).

Estimates cannot tell layouts apart that differ by less than their error (plan/planning/difference.py).
So there is a second answer beside the fastest layout: the plainest of all layouts within that error of
it (plain.py). A second queue, the plainest sizes first, finds it. Over all published sweeps it
ran 6.7 % slower than the best run, the fastest estimate 5.4 %; by constants that had not seen the table
both 5.7 %, or the cluster 6.1 and 5.7 %. What is plain costs half a percent in the mean.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Literal, NamedTuple

from mpctl.core.units import seconds_text
from mpctl.plan.planning.difference import ranking_error
from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.plan.search.bound import StepTimeBound
from mpctl.plan.search.cuts import PipelineLayouts
from mpctl.plan.search.evaluate import LayoutEvaluator
from mpctl.plan.search.plain import complexity, least_complexity
from mpctl.plan.search.room import expected_slowdown
from mpctl.plan.search.space import SearchSpace, overlaps_experts
from mpctl.spec.runtime import PlainLayout

Objective = Literal["tokens", "memory"]
Progress = Callable[[str, int, int], None]
Note = Callable[[str], None]
Level = Literal["axes", "family", "layout"]  # of the tree in plan/search/space.py
BUDGETS = 4  # the device's memory and its shares, in equal steps
REPORT_EVERY = 32  # parts taken from the queue between two reports of progress
PROGRESS_STEPS = 1000  # how finely the progress of the layouts is reported

ALIKE, AS_FAST = 0.01, 0.005
OPTIMISM = (0.01, 0.07)
"""Optimism of the fastest of several estimates relative to its sweep: the mean over the sweeps of tuned
software, and over those of nanotron's cluster, which nobody tuned."""


class LayoutClass(NamedTuple):
    """The settings that layouts of one row of an answer share."""

    tensor_mode: str
    tp: int
    pp: int
    ep: int = 1


class EvaluatedLayout(NamedTuple):
    """A layout with the seconds a step by which it is ordered and the bytes on the device of its fullest rank.
    slowdown: how much these seconds are longer than its step, for the room that it lacks (room.py)."""

    seconds: float
    bytes: int
    layout: LayoutSettings
    slowdown: float = 1.0

    @property
    def step_seconds(self) -> float:
        """The seconds of its step, as `mpctl plan` states them."""
        return self.seconds if self.slowdown == 1 else significant(self.seconds / self.slowdown)


class LayoutGroup(NamedTuple):
    """Layouts of one class that are as fast as each other. members: the best first, the fastest or, for
    least memory, the smallest."""

    members: tuple[EvaluatedLayout, ...]

    @property
    def first(self) -> EvaluatedLayout:
        """The best layout of the group."""
        return self.members[0]

    def plainest(self, plain: PlainLayout, suggested: EvaluatedLayout | None = None) -> EvaluatedLayout:
        """Return the plainest layout within AS_FAST of the best, or the suggested one if it is among these."""
        near = [point for point in self.members if point.seconds <= self.first.seconds * (1 + AS_FAST)]
        return min(near, key=lambda point: (point != suggested, complexity(point.layout, plain), point))


def without_other_orders(points: Sequence[EvaluatedLayout], point: EvaluatedLayout) -> list[EvaluatedLayout] | None:
    """The points without those that differ from this one only in the order of their axes; None if
    one of these is better than this one."""
    layout = point.layout._replace(order="")
    alike = [one for one in points if one.layout._replace(order="") == layout]
    return None if alike and alike[0] <= point else [one for one in points if one not in alike]


@dataclass
class BestClasses:
    """The best so far of the layouts that need at most `limit` bytes: those within ALIKE of the
    fastest of each class, of the `count` fastest classes."""

    limit: float
    count: int
    classes: dict[LayoutClass, list[EvaluatedLayout]] = field(default_factory=dict)
    worst: float = inf  # seconds above which no layout is wanted

    def wants(self, seconds: float, size: float, layout_class: LayoutClass | None = None) -> bool:
        """Whether a layout of at least `seconds` and `size` bytes may be among the best;
        layout_class: the layout's, if known."""
        if size > self.limit or seconds > self.worst:
            return False
        known = self.classes.get(layout_class) if layout_class else None
        return known is None or seconds <= known[0].seconds * (1 + ALIKE)

    def add(self, point: EvaluatedLayout) -> None:
        """Take the layout in if it is among the best."""
        if point.bytes > self.limit:
            return
        kept = without_other_orders(self.classes.get(class_of(point.layout), []), point)
        if kept is None:
            return
        insort(kept, point)
        least = kept[0].seconds * (1 + ALIKE)
        self.classes[class_of(point.layout)] = [one for one in kept if one.seconds <= least]
        if len(self.classes) >= self.count:
            fastest = sorted(points[0].seconds for points in self.classes.values())
            self.worst = fastest[self.count - 1] * (1 + ALIKE)

    def groups(self) -> list[LayoutGroup]:
        """The best classes, the fastest first."""
        groups = sorted((LayoutGroup(tuple(points)) for points in self.classes.values()), key=lambda g: g.first)
        return groups[: self.count]


def significant(seconds: float) -> float:
    """Return the seconds to ten digits: layouts that differ by less are as fast, and memory decides."""
    return float(f"{seconds:.10g}")


def non_dominated(points: Iterable[EvaluatedLayout]) -> list[EvaluatedLayout]:
    """Return the points that no other beats in time and memory, the fastest first."""
    front: list[EvaluatedLayout] = []
    for point in sorted(points, key=lambda p: (p.step_seconds, p.bytes, p.layout)):
        if not front or point.bytes < front[-1].bytes:
            front.append(point)
    return front


@dataclass
class FoundLayouts:
    """The result of a search of one space.

    groups: for each class the layouts that are equally fast or, for least memory, one layout each;
    best first. suggested: the plainest layout within `error`, a share, of the fastest; None for least
    memory. evaluated: every layout that fits and was evaluated. is_complete: false after Ctrl-C.
    too_large: layouts that were left out for their memory, of those that no bound on time had ruled out
    before.
    """

    groups: list[LayoutGroup] = field(default_factory=list)
    suggested: EvaluatedLayout | None = None
    error: float = 0.0
    is_complete: bool = True
    evaluated: list[EvaluatedLayout] = field(default_factory=list)
    too_large: int = 0

    @property
    def best(self) -> list[EvaluatedLayout]:
        """The first layout of each group, best first."""
        return [group.first for group in self.groups]

    @property
    def front(self) -> list[EvaluatedLayout]:
        """The evaluated layouts that no other beats in time and memory, the fastest first. Those of each
        memory budget are the fastest of all layouts within it."""
        return non_dominated(self.evaluated)


@dataclass
class LeastMemory:
    """The `count` layouts of least memory so far, of those that need at most `limit` bytes."""

    limit: float
    count: int
    best: list[EvaluatedLayout] = field(default_factory=list)

    @property
    def most_bytes(self) -> float:
        """Bytes above which a layout is no longer wanted."""
        full = len(self.best) == self.count
        return min(self.best[-1].bytes, self.limit) if full else self.limit

    def add(self, point: EvaluatedLayout) -> None:
        """Take the layout in if it is among the best."""
        kept = without_other_orders(self.best, point) if point.bytes <= self.limit else None
        if kept is not None:
            insort(kept, point, key=lambda p: (p.bytes, p.seconds, p.layout))
            self.best = kept[: self.count]


def find_layouts(
    space: SearchSpace,
    *,
    top: int = 5,
    budgets: int = BUDGETS,
    objective: Objective = "tokens",
    suggest: bool = True,
    exhaustive: bool = False,
    on_progress: Progress | None = None,
    on_note: Note | None = None,
    evaluator: LayoutEvaluator | None = None,
) -> FoundLayouts:
    """The layouts of the `top` fastest classes, or the `top` layouts of least memory.

    budgets: equal shares of the device's memory for each of which the best layout is found too.
    suggest: also find the plainest layout within the error of the fastest.
    exhaustive: evaluate every layout. on_note: is called with the best so far, in words. Ctrl-C
    ends the search with the layouts found so far. Raises MissingFigure where the device states no
    rate.
    """
    search = BranchAndBound(space, evaluator or LayoutEvaluator(space), top, budgets, on_note, objective)
    report = on_progress or (lambda stage, done, total: None)
    try:
        if exhaustive:
            search.evaluate_all()
        elif search.evaluator.min_state_bytes > search.least_memory.limit:
            pass  # not even the states fit, however they are sharded
        elif objective == "memory":
            search.minimize_memory(report)
        else:
            search.minimize_time(report)
        if space.tries_overlap and objective == "tokens":
            search.overlap_experts(report)
        if suggest and objective == "tokens":
            search.find_plainest(report)
    except KeyboardInterrupt:
        search.is_complete = False
    return search.result(objective)


class BranchAndBound:
    """A running search: the best layouts so far, and bounds on the memory of families."""

    def __init__(
        self,
        space: SearchSpace,
        evaluator: LayoutEvaluator,
        top: int,
        budgets: int,
        on_note: Note | None = None,
        objective: Objective = "tokens",
    ) -> None:
        self.space, self.evaluator, self.bound = space, evaluator, StepTimeBound(evaluator)
        self.families = PipelineLayouts(self.bound, proposes=objective == "tokens").families
        self.evaluated: list[EvaluatedLayout] = []
        self.is_complete = True
        self.suggested: EvaluatedLayout | None = None
        self.error = 0.0
        self.axes: list[tuple[float, LayoutSettings]] = []  # with lower bounds of their seconds
        self.on_note, self.fastest = on_note, inf
        self.too_large_count = 0
        memory = evaluator.usable_memory
        limits = [memory * share / budgets for share in range(budgets, 0, -1)]
        self.budgets = [BestClasses(limit, 1 if at else top) for at, limit in enumerate(limits)]
        self.least_memory = LeastMemory(memory, top)
        # Families (without their micro batch) in which no layout fits for some micro batch: that
        # micro batch, and the bytes that it needs at least.
        self.too_large: dict[LayoutSettings, tuple[int, float]] = {}

    def minimize_time(self, report: Progress) -> None:
        """Find the fastest layouts under each budget."""
        every = list(self.space.axes())
        for number, axes in enumerate(every):
            self.axes.append((self.bound.of_axes_quickly(axes), axes))
            if number % REPORT_EVERY == 0:
                report("bounds", number, len(every))
        self._descend(self.axes, report)

    def _descend(self, bounded: Sequence[tuple[float, LayoutSettings]], report: Progress) -> None:
        """Find the fastest layouts over these axes, which have lower bounds of their seconds."""
        queue: list[tuple[float, int, Level, LayoutSettings]] = [
            (least, number, "axes", axes) for number, (least, axes) in enumerate(bounded)
        ]
        heapify(queue)
        number, taken, least, done = len(queue), 0, queue[0][0] if queue else 0.0, 0.0
        while queue:
            bound, _, level, part = heappop(queue)
            worst = max(budget.worst for budget in self.budgets)
            if bound > worst or bound == inf:
                break
            for child_bound, child_level, child in self._children(bound, level, part):
                number += 1
                heappush(queue, (child_bound, number, child_level, child))
            taken += 1
            if taken % REPORT_EVERY == 0:  # of the queue, or how near bounds are to the best
                near = (bound - least) / (worst - least) if least < worst else 0.0
                done = max(done, near, taken / (taken + len(queue)))
                report("layouts", round(PROGRESS_STEPS * done), PROGRESS_STEPS)

    def _children(
        self, bound: float, level: Level, part: LayoutSettings
    ) -> Iterator[tuple[float, Level, LayoutSettings]]:
        """The children of a queue entry that are still wanted, with bounds; a layout is
        evaluated."""
        if level == "layout":
            self._evaluate(part, bound)
        elif level == "axes":
            for least, family in self._families(part, bound):
                yield least, "family", family
        elif self._wants(bound, 0.0, class_of(part)):
            needed = self._min_bytes(part, bound)
            if self._wants(bound, needed, class_of(part)):
                for least, member in self._members(part, bound):
                    yield least, "layout", member
            elif needed > self.budgets[0].limit:
                self.too_large_count += len(self.space.choices(part))

    def _families(self, axes: LayoutSettings, bound: float) -> Iterator[tuple[float, LayoutSettings]]:
        layout_class = class_of(axes)
        if not self._wants(bound, 0.0, layout_class):  # a better one was found since
            return
        if not self._wants(self.bound.of_axes(axes), 0.0, layout_class):
            return
        for family in self.families(axes):
            bound = self.bound.of_family(family)
            if self._wants(bound, 0.0, layout_class):
                yield bound, family

    def _members(self, family: LayoutSettings, bound: float) -> Iterator[tuple[float, LayoutSettings]]:
        """The layouts of a family whose ZeRO stage leaves them small enough."""
        sizes = dict[int, float]()
        for zero in self.space.zero_stages(family):
            sizes[zero] = self.evaluator.min_bytes(family, zero)
        layout_class = class_of(family)
        wanted = {zero for zero, size in sizes.items() if self._wants(bound, size, layout_class)}
        large = {zero for zero, size in sizes.items() if size > self.budgets[0].limit}
        members = list(self.space.members(family))
        self.too_large_count += sum(one.zero in large for one in members)
        layouts = (one for one in members if one.zero in wanted)
        for layout_bound, layout in self.bound.of_members(family, bound, layouts):
            if self._wants(layout_bound, sizes[layout.zero], layout_class):
                yield layout_bound, layout

    def _wants(self, seconds: float, size: float, layout_class: LayoutClass | None = None) -> bool:
        return any(budget.wants(seconds, size, layout_class) for budget in self.budgets)

    def _min_bytes(self, family: LayoutSettings, seconds: float = 0.0) -> float:
        """Bytes that every layout of the family, of at least `seconds`, needs at least: at least those of an
        equal family of a smaller micro batch that is too large. Where a quick bound is enough to rule it out,
        that one."""
        key, size = family._replace(micro_batch_size=0), family.micro_batch_size
        known = self.too_large.get(key)
        if known and size >= known[0] and not self._wants(0.0, known[1]):
            return known[1]
        needed = self.evaluator.least_bytes(family)
        if self._wants(seconds, needed, class_of(family)):
            needed = self.evaluator.min_bytes(family, max(self.space.zero_stages(family)))
        if (known is None or size < known[0]) and not self._wants(0.0, needed):
            self.too_large[key] = size, needed
        return needed

    def _evaluate(self, layout: LayoutSettings, bound: float) -> None:
        layout_class = class_of(layout)
        if not self._wants(bound, self.evaluator.min_bytes(layout, layout.zero), layout_class):
            return
        size = self.evaluator.device_bytes(layout)
        self.too_large_count += size > self.budgets[0].limit
        if self._wants(bound, size, layout_class):
            self._add(layout, size, self.budgets)

    def _add(
        self, layout: LayoutSettings, size: int, budgets: Sequence[BestClasses | LeastMemory]
    ) -> EvaluatedLayout | None:
        """Evaluate a layout and take it in where it is among the best; None where it cannot be timed or is not legal,
        or overlaps messages for nothing."""
        seconds = self.evaluator.step_seconds(layout)
        if seconds is None or not self.evaluator.is_legal(layout):
            return None
        if layout.moe_overlap and self.space.tries_overlap:
            plain = self.evaluator.step_seconds(layout._replace(moe_overlap=False))
            if plain is not None and plain <= seconds:
                return None
        slowdown = expected_slowdown(size / self.evaluator.device_memory)
        point = EvaluatedLayout(significant(seconds * slowdown), size, layout, slowdown)
        self.evaluated.append(point)
        if self.on_note:
            self.fastest = min(self.fastest, point.seconds)
            self.on_note(f"{len(self.evaluated)} estimated, best {seconds_text(self.fastest)}")
        for budget in budgets:
            budget.add(point)
        return point

    def overlap_experts(self, report: Progress) -> None:
        """Find the layouts of the best classes that are faster where rows are sent to experts beside another micro
        batch's work."""
        best, worst = {class_of(group.first.layout) for group in self.budgets[0].groups()}, self.budgets[0].worst
        overlapping = [
            axes._replace(moe_overlap=True)
            for least, axes in self.axes
            if least <= worst and class_of(axes) in best and overlaps_experts(axes._replace(vpp=2))
        ]
        self._descend([(self.bound.of_axes(axes), axes) for axes in overlapping], report)

    def find_plainest(self, report: Progress) -> None:
        """Find the plainest layout that fits and takes at most the ranking's error longer than the
        fastest; of equally plain ones the fastest. Sizes, pipelines and layouts are taken the plainest
        first."""
        groups = self.budgets[0].groups()
        if not groups:
            return
        fastest, plain = groups[0].first, self.evaluator.profile.plain
        time = self.evaluator.step_time(fastest.layout)
        assert time is not None, "it was timed before"
        self.error = ranking_error(time.high / time.low)
        most, limit = fastest.seconds * (1 + self.error), self.budgets[0].limit

        def key(point: EvaluatedLayout) -> tuple[float, EvaluatedLayout]:
            return complexity(point.layout, plain), point

        known = {point.layout for point in self.evaluated}
        best = min(key(point) for point in self.evaluated if point.seconds <= most)
        self.suggested = best[1]
        queue: list[tuple[float, float, int, Level, LayoutSettings]] = [
            (least_complexity(axes, plain), bound, number, "axes", axes)
            for number, (bound, axes) in enumerate(self.axes)
            if bound <= most
        ]
        heapify(queue)
        number = len(self.axes)
        while queue and queue[0][:2] <= (best[0], best[1].seconds):
            least, bound, _, level, part = heappop(queue)
            children: Iterable[tuple[float, Level, LayoutSettings]] = ()
            if level == "axes" and (bound := self.bound.of_axes(part)) <= most:
                children = ((self.bound.of_family(family), "family", family) for family in self.families(part))
            elif level == "family" and self._min_bytes(part) <= limit:
                layouts = self.bound.of_members(part, bound, self.space.members(part))
                children = ((bound, "layout", layout) for bound, layout in layouts)
            elif level == "layout" and part not in known and self.evaluator.min_bytes(part, part.zero) <= limit:
                size = self.evaluator.device_bytes(part)
                if size <= limit and (point := self._add(part, size, [])) is not None and point.seconds <= most:
                    best = min(best, key(point))
                    self.suggested = best[1]
            for bound, child_level, child in children:
                number += 1
                of_child = complexity if child_level == "layout" else least_complexity
                if bound <= most and (least := of_child(child, plain)) <= best[0]:
                    heappush(queue, (least, bound, number, child_level, child))

    def minimize_memory(self, report: Progress) -> None:
        """Find the layouts of least memory, smaller micro batches first: a family too large for one
        is too large for larger ones."""
        every = sorted(self.space.axes(), key=lambda axes: axes.micro_batch_size)
        dropped = set[LayoutSettings]()
        for number, axes in enumerate(every):
            if number % REPORT_EVERY == 0:
                report("layouts", number, len(every))
            for family in self.families(axes):
                key = family._replace(micro_batch_size=0)
                if key in dropped:
                    continue
                needed = self._min_bytes(family)
                if needed > self.least_memory.limit:
                    self.too_large_count += len(self.space.choices(family))
                if needed > self.least_memory.most_bytes:
                    dropped.add(key)
                    continue
                self._add_small(family)

    def _add_small(self, family: LayoutSettings) -> None:
        for layout in self.space.members(family):
            size = self.evaluator.device_bytes(layout)
            self.too_large_count += size > self.least_memory.limit
            if size <= self.least_memory.most_bytes:
                self._add(layout, size, [self.least_memory])

    def evaluate_all(self) -> None:
        """Evaluate every layout of the space."""
        self.axes += [(0.0, axes) for axes in self.space.axes()]
        every = (family for _, axes in self.axes for family in self.families(axes))
        for layout in (member for family in every for member in self.space.members(family)):
            size = self.evaluator.device_bytes(layout)
            if size > self.budgets[0].limit:
                self.too_large_count += 1
            else:
                self._add(layout, size, [*self.budgets, self.least_memory])

    def result(self, objective: Objective) -> FoundLayouts:
        """The result so far."""
        groups = self.budgets[0].groups()
        if objective == "memory":
            groups = [LayoutGroup((point,)) for point in self.least_memory.best]
        return FoundLayouts(groups, self.suggested, self.error, self.is_complete, self.evaluated, self.too_large_count)


def class_of(layout: LayoutSettings) -> LayoutClass:
    """The class that the layout belongs to."""
    return LayoutClass(layout.tensor_mode, layout.tp, layout.pp, layout.ep)
