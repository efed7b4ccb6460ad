"""When each stage of a pipeline ends its last action, without playing every micro batch.

Given the seconds of a chunk's forward and backward and of each message between stages. Exact where
it can be: gpipe in closed form (a flow shop of equal jobs: the sum, and m-1 times the slowest);
1f1b round by round, and as soon as all stages have moved on by the same time in one round they will
in every other (max-plus linearity), so that the rest is a multiplication. For chunks and
zero-bubble a shorter step is played (model/pipeline/schedule/replay.py), and each further micro batch
adds the busiest stage's seconds for it; in a V, the seconds by which a step half as long again is longer, since
v-min waits in every round where forward, inputs and weights take unequal times.
tests/plan/estimate/test_makespan.py compares all of it with the
replay of every action.

By hand, 2 stages, F = 1, B = 2, no messages, m micro batches: stage 0 ends at 3 m + 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from mpctl.model.pipeline.placement import StageChunk, StagePlacement
from mpctl.model.pipeline.schedule.orders import Kind, actions
from mpctl.model.pipeline.schedule.replay import Turns
from mpctl.spec.parallel import ScheduleName
from mpctl.spec.schedules import SCHEDULES

GROUPS, GROUPS_OF_CHUNKS = 3, 2  # of p micro batches that are played before the rest is known
GROUPS_OF_V = 4, 6  # of p micro batches: the length of two steps tells how much one more adds
SETTLED = 1e-9  # relative difference of two rounds that counts as none


class ChunkTimes(NamedTuple):
    """Seconds of one micro batch: forward, and backward in its two parts."""

    forward: float
    inputs: float
    weights: float

    @property
    def backward(self) -> float:
        """Seconds of the full backward."""
        return self.inputs + self.weights

    def of(self, kind: Kind) -> float:
        """Seconds of an action of this kind."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "backward_input": self.inputs,
            "backward_weight": self.weights,
        }[kind]


class ChunkPass(NamedTuple):
    """One micro batch through a chunk: its seconds, and their parts."""

    chunk: ChunkTimes
    compute: float
    tp: float
    cp: float
    dp_cp: float
    other: float
    ep: float = 0.0


class PipelineTiming(NamedTuple):
    """chunks[stage][chunk]; ahead[v], back[v]: seconds of the message from virtual stage v to the
    next, and of the gradient back to v."""

    schedule: ScheduleName
    chunks: Sequence[Sequence[ChunkTimes]]
    ahead: Sequence[float]
    back: Sequence[float]
    microbatches: int

    def ends(self) -> list[float]:
        """Seconds from the start of the step to the end of the last action of each stage. Layouts that differ
        in messages once a step have the same, which are computed once."""
        chunks = tuple([tuple(row) for row in self.chunks])
        return list(_ends(self._replace(chunks=chunks, ahead=tuple(self.ahead), back=tuple(self.back))))

    def _find_ends(self) -> list[float]:
        stages, vpp = len(self.chunks), len(self.chunks[0])
        if stages == 1:
            only = self.chunks[0]
            return [self.microbatches * sum(c.forward + c.backward for c in only)]
        timing = SCHEDULES[self.schedule].timing
        if vpp == 1 and timing == "gpipe":
            return self._gpipe()
        if vpp == 1 and timing == "1f1b":
            return self._one_f_one_b()
        return self._played()

    def _gpipe(self) -> list[float]:
        rest = self.microbatches - 1
        forward = [row[0].forward for row in self.chunks]
        backward = [row[0].backward for row in reversed(self.chunks)]
        turn = sum(forward) + sum(self.ahead) + rest * max(forward)
        sums = accumulate(backward)
        gone = accumulate((*reversed(self.back), 0.0), initial=0.0)
        slowest = accumulate(backward, max)
        ends = [turn + a + b + rest * c for a, b, c in zip(sums, gone, slowest, strict=False)]
        return ends[::-1]

    def _one_f_one_b(self) -> list[float]:
        """Round i runs F i on every stage, then B i - w where w is its warm-up."""
        p, m = len(self.chunks), self.microbatches
        forward = [row[0].forward for row in self.chunks]
        backward = [row[0].backward for row in self.chunks]
        ahead, back = (0.0, *self.ahead), (*self.back, 0.0)
        clock, ended, index = [0.0] * p, [0.0] * p, 0
        last = p - 1
        while index < m + last:
            before = clock.copy() if last <= index < m else None
            if index < m:
                arrives = 0.0
                for s in range(p):
                    at = clock[s]
                    arrives += ahead[s]
                    if arrives > at:
                        at = arrives
                    arrives = clock[s] = at + forward[s]
            first = last - index if index < last else 0
            stop = p if index < m else p - (index - m + 1)
            for s in range(first, stop):  # B of the next stage is of the round before
                at = clock[s]
                if s < last and ended[s + 1] + back[s] > at:
                    at = ended[s + 1] + back[s]
                clock[s] = at + backward[s]
            ended[first:stop] = clock[first:stop]
            index += 1
            if before is not None and index < m:
                moved = clock[0] - before[0]
                slack = SETTLED * clock[0]
                if all(abs(c - b - moved) <= slack for c, b in zip(clock, before, strict=True)):
                    jump = moved * (m - index)
                    clock = [c + jump for c in clock]
                    ended, index = clock.copy(), m
        return clock

    def _played(self) -> list[float]:
        p, m, vpp = len(self.chunks), self.microbatches, len(self.chunks[0])
        if SCHEDULES[self.schedule].is_v:
            return self._played_v()
        played = min(m, p * (GROUPS_OF_CHUNKS if vpp > 1 else GROUPS))
        ends = self._ends_of(played)
        slowest = max(sum(c.forward + c.backward for c in row) for row in self.chunks)
        return [end + (m - played) * slowest for end in ends]

    def _played_v(self) -> list[float]:
        p, m = len(self.chunks), self.microbatches
        long = min(m, p * GROUPS_OF_V[1])
        ends = self._ends_of(long)
        if m == long:
            return ends
        short = p * GROUPS_OF_V[0]
        each = (max(ends) - max(self._ends_of(short))) / (long - short)
        return [end + (m - long) * each for end in ends]

    def _ends_of(self, microbatches: int) -> list[float]:
        turns = _turns(self.schedule, len(self.chunks), microbatches, len(self.chunks[0]))
        return turns.ends(lambda s, c, kind: self.chunks[s][c].of(kind), self.transfer)

    def transfer(self, sender: StageChunk, receiver: StageChunk) -> float:
        """Seconds in which one micro batch gets from a chunk to its neighbour."""
        placement = StagePlacement(len(self.chunks), len(self.chunks[0]), SCHEDULES[self.schedule].is_v)
        a, b = map(placement.virtual, (sender, receiver))
        return self.ahead[a] if a < b else self.back[b]


@lru_cache(maxsize=4096)
def _ends(timing: PipelineTiming) -> tuple[float, ...]:
    return tuple(timing._find_ends())


@lru_cache(maxsize=64)
def _turns(name: ScheduleName, p: int, m: int, vpp: int) -> Turns:
    orders = (actions(name, stage=s, stages=p, microbatches=m, chunks=vpp) for s in range(p))
    return Turns.of(orders, is_v=SCHEDULES[name].is_v)
