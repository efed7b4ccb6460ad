"""Simulates when the actions of all pipeline stages would run, from the seconds that each takes.

A stage does one action at a time, in order, as soon as its input is there. A forward needs the
activations of the previous virtual stage; a backward the gradient of the next one (on the last, its
own forward); weight gradients need the input gradients of the same stage. A message arrives
`transfer` seconds after the action that made it, a number or a function of sender and receiver. It
keeps no stage busy, and links are not shared. If a stage takes F, B (and W) seconds for all its
work on one micro batch, the same on all p stages, and transfers take none, the makespan is
m (F + B + W) and, in addition,

    gpipe, 1f1b  (p-1) (F + B)                                      (p-1)/m of the ideal time
    interleaved  (p-1) (F + B) / v                                  (p-1)/(v m)
    zero-bubble  (p-1) (F + B) - (min(m, p) - 1) min(F, B, W)       its B and W are 1f1b's B

The last is arXiv 2401.10241's (p-1) (F + B - W) where m >= p and W is the least of the three.

>>> from mpctl.model.pipeline.schedule.orders import actions
>>> orders = [actions("1f1b", stage=stage, stages=2, microbatches=3) for stage in range(2)]
>>> line = replay(orders, lambda stage, chunk, kind: 1 if kind == "forward" else 2)
>>> line.makespan, line.idle, line.in_flight        # 3 (1 + 2) + (2-1) (1 + 2)
(12, (3, 3), (2, 1))
>>> line.starts[0]                                  # F0 F1 B0 F2 B1 B2
(0, 1, 4, 6, 7, 10)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import NamedTuple

from mpctl.model.pipeline.placement import StageChunk, StagePlacement
from mpctl.model.pipeline.schedule.orders import Action, Kind, most_in_flight, show, source

Seconds = Callable[[int, int, Kind], float]  # of (stage, chunk, kind); asked once for each
Transfer = Callable[[StageChunk, StageChunk], float]  # of (sender, receiver); asked once for each and kind
Order = tuple[Action, ...]


class DeadlockError(ValueError):
    """Every stage with actions left waits for a result that no stage can compute first."""


@dataclass(frozen=True)
class Timeline:
    """The actions of each stage (`orders[stage]`) with their starts and ends in seconds."""

    orders: tuple[Order, ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each stage computes."""
        pairs = zip(self.ends, self.starts, strict=True)
        return tuple(sum(map(sub, ends, starts)) for ends, starts in pairs)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each stage does not compute: its bubble."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most activations of one micro batch in one chunk that each stage holds at once."""
        return tuple(most_in_flight(order) for order in self.orders)


class Pass(NamedTuple):
    """The actions of one kind and chunk on a stage. sender: the stage that sends the result that
    they need; None if the chunk computes it itself or none is needed."""

    stage: int
    chunk: int
    kind: Kind
    sender: StageChunk | None

    def delay(self, transfer: float | Transfer) -> float:
        """Seconds until the needed result arrives."""
        if self.sender is None or self.sender.stage == self.stage:
            return 0
        place = StageChunk(self.stage, self.chunk)
        return transfer(self.sender, place) if callable(transfer) else transfer


class Turn(NamedTuple):
    """An action. number: of its pass; needs, gives: numbers of results, -1 for none."""

    stage: int
    number: int
    needs: int
    gives: int


class Turns(NamedTuple):
    """The actions of all stages in an order in which each comes after the one whose result it
    needs. The order does not depend on the seconds of actions, so it is computed once."""

    orders: tuple[Order, ...]
    passes: tuple[Pass, ...]
    turns: tuple[Turn, ...]
    results: int

    @classmethod
    def of(cls, orders: Iterable[Iterable[Action]], *, is_v: bool = False) -> Turns:
        """The turns of stages 0, 1, ... is_v: their virtual stages go forward and back. Raises
        DeadlockError if not all actions can be done."""
        played = tuple(map(tuple, orders))
        work = [action for order in played for action in order]
        chunks = 1 + max((action.chunk for action in work), default=0)
        shape = _Shape(len(played), chunks, 1 + max((action.microbatch for action in work), default=0), is_v)
        rows: list[dict[tuple[Kind, int], _Row]] = []
        passes: list[Pass] = []
        for stage, order in enumerate(played):
            kinds = dict.fromkeys((action.kind, action.chunk) for action in order)
            rows.append({})
            for kind, chunk in kinds:
                row = shape.row(len(passes), kind, StageChunk(stage, chunk))
                rows[-1][kind, chunk] = row
                passes.append(Pass(stage, chunk, kind, row.sender))
        turns = tuple(_in_order_of_need(played, rows, shape.results))
        return cls(played, tuple(passes), turns, shape.results)

    def starts(self, seconds: Sequence[float], delays: Sequence[float]) -> tuple[list[float], list[float]]:
        """(the start of each turn, the end of each stage's last); seconds and delays by pass."""
        clocks: list[float] = [0] * len(self.orders)
        done: list[float] = [0] * (self.results + 1)  # the last one is for -1
        starts: list[float] = []
        for stage, number, needs, gives in self.turns:
            start, ready = clocks[stage], done[needs] + delays[number]
            if ready > start:
                start = ready
            starts.append(start)
            clocks[stage] = done[gives] = start + seconds[number]
        return starts, clocks

    def ends(self, seconds: Seconds, transfer: float | Transfer) -> list[float]:
        """The end of each stage's last action; arguments as of `replay`."""
        return self.starts(*self._durations(seconds, transfer))[1]

    def timeline(self, seconds: Seconds, transfer: float | Transfer) -> Timeline:
        """Every action with its start and end; arguments as of `replay`."""
        own, delays = self._durations(seconds, transfer)
        starts: list[list[float]] = [[] for _ in self.orders]
        ends: list[list[float]] = [[] for _ in self.orders]
        for turn, start in zip(self.turns, self.starts(own, delays)[0], strict=True):
            starts[turn.stage].append(start)
            ends[turn.stage].append(start + own[turn.number])
        return Timeline(self.orders, tuple(map(tuple, starts)), tuple(map(tuple, ends)))

    def _durations(self, seconds: Seconds, transfer: float | Transfer) -> tuple[list[float], list[float]]:
        own = [seconds(each.stage, each.chunk, each.kind) for each in self.passes]
        return own, [each.delay(transfer) for each in self.passes]


class _Row(NamedTuple):
    """A pass with the numbers of the results that it needs and gives for micro batch 0; those of
    other micro batches follow from these. number: that of the pass."""

    number: int
    needs: int | None
    gives: int
    sender: StageChunk | None


class _Shape(NamedTuple):
    stages: int
    chunks: int
    microbatches: int
    is_v: bool = False

    @property
    def results(self) -> int:
        return 3 * self.chunks * self.stages * self.microbatches

    def number(self, kind: Kind, place: StageChunk) -> int:
        """Number of the result of micro batch 0: activations first, then gradients, then dW."""
        part = {"forward": 0, "backward_weight": 2}.get(kind, 1)
        virtual = StagePlacement(self.stages, self.chunks, self.is_v).virtual(place)
        return (part * self.chunks * self.stages + virtual) * self.microbatches

    def row(self, index: int, kind: Kind, place: StageChunk) -> _Row:
        action, gives = Action(kind, 0, place.chunk), self.number(kind, place)
        sender = source(action, stage=place.stage, stages=self.stages, chunks=self.chunks, is_v=self.is_v)
        if sender is not None:
            return _Row(index, self.number(kind, sender), gives, sender)
        if kind == "forward":
            return _Row(index, None, gives, None)
        own: Kind = "backward_input" if kind == "backward_weight" else "forward"
        return _Row(index, self.number(own, place), gives, None)


def replay(
    orders: Iterable[Iterable[Action]], seconds: Seconds, *, transfer: float | Transfer = 0, is_v: bool = False
) -> Timeline:
    """Simulate the actions of stages 0, 1, ...

    seconds: of an action, by (stage, chunk, kind). transfer: seconds of a message, the same for all
    or a function of (sender, receiver). is_v: the virtual stages go forward and back (placement.py).
    Raises DeadlockError if not all actions can be done.
    """
    return Turns.of(orders, is_v=is_v).timeline(seconds, transfer)


def _in_order_of_need(
    orders: tuple[Order, ...], rows: list[dict[tuple[Kind, int], _Row]], results: int
) -> Iterator[Turn]:
    """A stage runs until a result is missing, and continues once it exists."""
    done, at = bytearray(results), [0] * len(orders)
    waiting: dict[int, int] = {}  # missing result -> the stage that needs it
    called = list(range(len(orders)))
    while called:
        stage = called.pop()
        order, table = orders[stage], rows[stage]
        for kind, microbatch, chunk in order[at[stage] :]:
            number, needs, gives, _ = table[kind, chunk]
            if needs is not None and not done[needs + microbatch]:
                waiting[needs + microbatch] = stage
                break
            yield Turn(stage, number, -1 if needs is None else needs + microbatch, gives + microbatch)
            at[stage] += 1
            done[gives + microbatch] = 1
            if gives + microbatch in waiting:
                called.append(waiting.pop(gives + microbatch))
    waits = [
        f"stage {stage} waits at {show(order[gone : gone + 1])}"
        for stage, (order, gone) in enumerate(zip(orders, at, strict=True))
        if gone < len(order)
    ]
    if waits:
        raise DeadlockError(f"no stage can go on: {', '.join(waits)}; order them as actions() does")
