"""Splits layers of different costs into pipeline stages so that the slowest stage is fastest.

All stages wait for the slowest one: m micro batches take (m - 1) times its seconds, plus once the
seconds of all stages, a sum that is the same for every cut. So the slowest stage is to be as fast
as possible. Layers stay in order, each chunk holds at least one, and the cost of a stage is that of
its chunks together (placement.py).

The search starts from stages with equal numbers of layers, and again from stages of about equal
cost. It moves one layer of the slowest stage to another chunk as long as the cut gets better: the
slowest stage gets faster or, at equal speed, the other stages and chunks get more even. Costs are
integers and nothing is random, so that the planner and every worker find the same cut.

With one chunk a stage, or with equal layers, the result is the best of all cuts in nearly all cases
(tests/model/pipeline/test_balance.py compares with every cut). With several chunks of unequal layers the
slowest stage may take some hundredths longer than in the best cut.

>>> balanced_counts(LayerCosts([2] * 24, exit=7), pp=4)             # 55 / 4 is 13.75
[7, 7, 7, 3]
>>> balanced_counts(LayerCosts([2] * 8, exit=10), pp=2, vpp=2)      # 12 against 4 + 10 = 14
[3, 1, 3, 1]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from mpctl.model.pipeline.placement import StagePlacement

Bounds = list[int]  # where virtual stages begin, and the end


@dataclass(frozen=True)
class LayerCosts:
    """Costs, in any unit: of each layer, of the embedding (entry), of the output head (exit)."""

    layers: Sequence[int]
    entry: int = 0
    exit: int = 0

    def of_stages(self, stages: Sequence[Sequence[tuple[int, int]]], *, exit_stage: int = -1) -> list[int]:
        """The cost of each stage, ends included. stages: spans of layers by [stage][chunk]; exit_stage: the
        one with the output head."""
        found = [sum(sum(self.layers[start:stop]) for start, stop in spans) for spans in stages]
        found[0] += self.entry
        found[exit_stage] += self.exit
        return found


def balanced_counts(costs: LayerCosts, *, pp: int, vpp: int = 1, is_v: bool = False) -> list[int]:
    """Number of layers of every virtual stage, so that the slowest of pp stages is fastest.

    There must be at least pp x vpp layers. is_v: virtual stages go over the stages and back.
    """
    blocks, layers = pp * vpp, len(costs.layers)
    assert blocks <= layers, f"{layers} layers leave some of {blocks} chunks empty"
    placement = StagePlacement(pp, vpp, is_v)
    stage_of = [placement.place(block).stage for block in range(blocks)]
    search = _BalanceSearch(costs, list(accumulate(costs.layers, initial=0)), pp, stage_of)
    even = [layers * block // blocks for block in range(blocks + 1)]
    ended = [search.descend(bounds) for bounds in (even, search.at_equal_costs(blocks))]
    best = min(ended, key=search.rank)
    return [stop - start for start, stop in pairwise(best)]


def counts_beside(layers: Sequence[int], items: Sequence[int], *, pp: int, closed: int = 0) -> list[int]:
    """Number of layers of every virtual stage beside other items, so that the slowest of pp stages is fastest.

    layers: the cost of each layer; items: that of what else each virtual stage has, in order over the
    stages; closed: the last virtual stages that take no layer. One with an item may have no layer, others have
    one or more. Each layer goes to the stage with least to do, of equal ones to the last, which holds the fewest
    micro batches. Layers count as the commonest; what others cost more or less is an item of their stage.

    By hand, 8 layers on 4 stages, a head as long as 2: 2, 2, 3 and 1 with the head, 3 at most.

    >>> counts_beside([10] * 8, [0, 0, 0, 20], pp=4)
    [2, 2, 3, 1]
    """
    common = Counter(layers).most_common(1)[0][0]
    differences, found = [0] * len(items), list[list[int]]()
    for _ in range(1 + any(cost != common for cost in layers)):
        beside = [item + more for item, more in zip(items, differences, strict=True)]
        least = [int(not item) for item in items[: len(items) - closed]] + [0] * closed
        found.append(_dealt(len(layers), common, beside, least, pp, closed))
        bounds = list(accumulate(found[-1], initial=0))
        differences = [sum(layers[a:b]) - common * (b - a) for a, b in pairwise(bounds)]
    return min(found, key=lambda counts: max(stage_costs(layers, items, counts, pp)))


def stage_costs(layers: Sequence[int], items: Sequence[int], counts: Sequence[int], pp: int) -> list[int]:
    """The cost of each stage, whose virtual stages have these numbers of layers and items of these costs."""
    before = [0, *accumulate(layers)]
    bounds = list(accumulate(counts, initial=0))
    parts = [before[b] - before[a] + item for (a, b), item in zip(pairwise(bounds), items, strict=True)]
    return [sum(parts[stage::pp]) for stage in range(pp)]


def _dealt(layers: int, cost: int, items: Sequence[int], least: Sequence[int], pp: int, closed: int) -> list[int]:
    """Equal layers dealt to the stage with least to do, in it to the chunk with least to do."""
    counts, parts = [*least], range(len(least) - closed)
    open_stages = sorted({part % pp for part in parts})
    costs = [(sum(items[s::pp]) + cost * sum(counts[s::pp]), -s) for s in open_stages]
    heapify(costs)
    more = [0] * pp
    for _ in range(layers - sum(counts)):
        now, turned = costs[0]
        more[-turned] += 1
        heapreplace(costs, (now + cost, turned))
    for stage in open_stages:
        if len(parts[stage::pp]) == 1:
            counts[stage] += more[stage]
            continue
        chunks = [(items[at] + cost * counts[at], -at) for at in parts[stage::pp]]
        heapify(chunks)
        for _ in range(more[stage]):
            now, turned = chunks[0]
            counts[-turned] += 1
            heapreplace(chunks, (now + cost, turned))
    return counts


@dataclass(frozen=True)
class _BalanceSearch:
    """A search that moves layers between chunks. before[n]: the cost of the first n layers; stage_of: the
    stage of each virtual stage."""

    costs: LayerCosts
    before: list[int]
    pp: int
    stage_of: list[int]

    def chunks(self, bounds: Bounds) -> list[int]:
        found = [self.before[stop] - self.before[start] for start, stop in pairwise(bounds)]
        found[0] += self.costs.entry
        found[-1] += self.costs.exit
        return found

    def stages(self, chunks: Sequence[int]) -> list[int]:
        sums = [0] * self.pp
        for stage, cost in zip(self.stage_of, chunks, strict=True):
            sums[stage] += cost
        return sums

    def rank(self, bounds: Bounds) -> tuple[list[int], list[int]]:
        """A sort key, best first: costs of stages from the slowest down, then those of chunks."""
        chunks = self.chunks(bounds)
        return sorted(self.stages(chunks), reverse=True), sorted(chunks, reverse=True)

    def at_equal_costs(self, blocks: int) -> Bounds:
        """Bounds that make the costs of the virtual stages as equal as possible."""
        costs, layers, bounds = self.costs, len(self.costs.layers), [0]
        whole = costs.entry + self.before[-1] + costs.exit
        for block in range(1, blocks):
            possible = range(bounds[-1] + 1, layers - (blocks - block) + 1)
            share = whole * block - costs.entry * blocks
            bounds.append(min(possible, key=lambda at: abs(self.before[at] * blocks - share)))
        return [*bounds, layers]

    def descend(self, bounds: Bounds) -> Bounds:
        while (better := self._step(bounds)) != bounds:
            bounds = better
        return bounds

    def _step(self, bounds: Bounds) -> Bounds:
        """The best of these bounds and of all with one layer of the slowest stage moved.

        Of equally good ones: these, then those with the lowest giver and taker.
        """
        best, found = (*self.rank(bounds), -1, -1), bounds
        slowest = best[0][0]
        for giver, taker, stages, chunks, moved in self._moves(bounds):
            if max(stages) <= slowest and (ranked := sorted(stages, reverse=True)) <= best[0]:
                key = (ranked, sorted(chunks, reverse=True), giver, taker)
                if key < best:
                    best, found, slowest = key, moved.copy(), ranked[0]
        return found

    def _moves(self, bounds: Bounds) -> Iterator[tuple[int, int, list[int], list[int], Bounds]]:
        """Every move of one layer from a chunk of the slowest stage (giver) to another (taker).

        Yields (giver, taker, costs of stages, costs of chunks, bounds) after the move, in which
        all bounds between the two chunks move by one. The lists are changed in place for the next
        taker, which moves one bound more; copy what is to be kept.
        """
        now = self.chunks(bounds)
        stages, blocks = self.stages(now), len(now)
        slowest = stages.index(max(stages))
        for giver in range(blocks):
            if self.stage_of[giver] != slowest or bounds[giver + 1] - bounds[giver] == 1:
                continue
            for way, takers in ((-1, range(giver + 1, blocks)), (1, range(giver - 1, -1, -1))):
                moved, chunks, sums = bounds.copy(), now.copy(), stages.copy()
                for taker in takers:
                    bound = max(taker, taker + way)  # between the taker and its neighbour
                    layer = moved[bound] + min(way, 0)
                    moved[bound] += way
                    for chunk, cost in ((taker, 1), (taker + way, -1)):
                        chunks[chunk] += cost * self.costs.layers[layer]
                        sums[self.stage_of[chunk]] += cost * self.costs.layers[layer]
                    yield giver, taker, sums, chunks, moved
