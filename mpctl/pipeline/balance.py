"""Cutting layers that cost differently into stages of a pipeline, so that the slowest is fastest.

All stages wait for the slowest one: m micro batches take (m - 1) times its time and once that of
all, which no cut changes. Layers stay in order, each chunk holds one at least, and a stage takes
what its chunks take together (virtual stage v is chunk v // pp of stage v % pp). From an even start
and from one of equal costs, a layer of the slowest stage is given away as long as that leaves its
successor faster; of equally slow cuts the one whose other stages and chunks are more even wins.
Costs are whole numbers and nothing is drawn, so that all who ask find the same cut.

With one chunk a stage, or equal layers, the slowest stage of all cuts is the fastest in nearly all
cases (tests/pipeline/test_balance.py compares with every cut); with several chunks of unequal
layers it may take some hundredths longer.

>>> balanced_counts(Costs([2] * 24, exit=7), pp=4)             # 55 / 4 is 13.75
[7, 7, 7, 3]
>>> balanced_counts(Costs([2] * 8, exit=10), pp=2, vpp=2)      # 12 against 4 + 10 = 14
[3, 1, 3, 1]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Bounds = list[int]  # where virtual stages begin, and the end


@dataclass(frozen=True)
class LayerCosts:
    """What each layer takes, and what a model's ends take besides, in any unit."""

    layers: Sequence[int]
    entry: int = 0
    exit: int = 0

    def of_stages(self, stages: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
        """By the layers that each stage holds, `[stage][chunk]`."""
        found = [sum(sum(self.layers[start:stop]) for start, stop in spans) for spans in stages]
        found[0] += self.entry
        found[-1] += self.exit
        return found


def balanced_counts(costs: LayerCosts, *, pp: int, vpp: int = 1) -> list[int]:
    """Layers of every virtual stage, of which there are no more than layers."""
    blocks, layers = pp * vpp, len(costs.layers)
    assert blocks <= layers, f"{layers} layers leave some of {blocks} chunks empty"
    search = _BalanceSearch(costs, list(accumulate(costs.layers, initial=0)), pp)
    even = [layers * block // blocks for block in range(blocks + 1)]
    ended = [search.descend(bounds) for bounds in (even, search.at_equal_costs(blocks))]
    best = min(ended, key=search.rank)
    return [stop - start for start, stop in pairwise(best)]


@dataclass(frozen=True)
class _BalanceSearch:
    """before[n]: what the first n layers take."""

    costs: LayerCosts
    before: list[int]
    pp: int

    def chunks(self, bounds: Bounds) -> list[int]:
        found = [self.before[stop] - self.before[start] for start, stop in pairwise(bounds)]
        found[0] += self.costs.entry
        found[-1] += self.costs.exit
        return found

    def stages(self, chunks: Sequence[int]) -> list[int]:
        return [sum(chunks[stage :: self.pp]) for stage in range(self.pp)]

    def rank(self, bounds: Bounds) -> tuple[list[int], list[int]]:
        """The less the better: the slowest stage, then the second slowest, ...; then of chunks."""
        chunks = self.chunks(bounds)
        return sorted(self.stages(chunks), reverse=True), sorted(chunks, reverse=True)

    def at_equal_costs(self, blocks: int) -> Bounds:
        """Each bound where the layers before it have taken nearest to their share of the whole."""
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
        """The best of these bounds and of those with a layer of the slowest stage given away; of
        equally good ones these, then those with the first giver and taker."""
        best, found = (*self.rank(bounds), -1, -1), bounds
        slowest = best[0][0]
        for giver, taker, stages, chunks, moved in self._moves(bounds):
            if max(stages) <= slowest and (ranked := sorted(stages, reverse=True)) <= best[0]:
                key = (ranked, sorted(chunks, reverse=True), giver, taker)
                if key < best:
                    best, found, slowest = key, moved.copy(), ranked[0]
        return found

    def _moves(self, bounds: Bounds) -> Iterator[tuple[int, int, list[int], list[int], Bounds]]:
        """(giver, taker, what stages and chunks take then, bounds then), for a layer of the slowest
        stage given to any other chunk: all bounds between the two chunks move by one. The lists
        are used again: each taker further away moves one bound more."""
        now = self.chunks(bounds)
        stages, blocks = self.stages(now), len(now)
        for giver in range(stages.index(max(stages)), blocks, self.pp):
            if bounds[giver + 1] - bounds[giver] == 1:
                continue
            for way, takers in ((-1, range(giver + 1, blocks)), (1, range(giver - 1, -1, -1))):
                moved, chunks, sums = bounds.copy(), now.copy(), stages.copy()
                for taker in takers:
                    bound = max(taker, taker + way)  # between the taker and its neighbour
                    layer = moved[bound] + min(way, 0)
                    moved[bound] += way
                    for chunk, cost in ((taker, 1), (taker + way, -1)):
                        chunks[chunk] += cost * self.costs.layers[layer]
                        sums[chunk % self.pp] += cost * self.costs.layers[layer]
                    yield giver, taker, sums, chunks, moved
