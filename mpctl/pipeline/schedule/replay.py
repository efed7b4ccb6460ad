"""When a pipeline's actions would run: the orders of all stages simulated with given seconds.

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

>>> from mpctl.pipeline.schedule.orders import actions
>>> orders = [actions("1f1b", stage=stage, stages=2, microbatches=3) for stage in range(2)]
>>> line = replay(orders, lambda stage, chunk, kind: 1 if kind == "forward" else 2)
>>> line.makespan, line.idle, line.in_flight        # 3 (1 + 2) + (2-1) (1 + 2)
(12, (3, 3), (2, 1))
>>> line.starts[0]                                  # F0 F1 B0 F2 B1 B2
(0, 1, 4, 6, 7, 10)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import NamedTuple

from mpctl.pipeline.schedule.orders import Action, Kind, StageChunk, most_in_flight, show, source

Seconds = Callable[[int, int, Kind], float]  # of (stage, chunk, kind); asked once for each
Transfer = Callable[
    [StageChunk, StageChunk], float
]  # of (sender, receiver); asked once for each and kind
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


class _Row(NamedTuple):
    """What a stage's actions of one kind and chunk have in common.

    seconds: of one action; delay: seconds until the result that it needs arrives. needs, gives: the
    numbers of the results for micro batch 0; those of the other micro batches follow.
    """

    seconds: float
    needs: int | None
    delay: float
    gives: int


@dataclass(frozen=True, slots=True)
class _Shape:
    stages: int
    chunks: int
    microbatches: int

    @classmethod
    def of(cls, orders: tuple[Order, ...]) -> _Shape:
        work = [action for order in orders for action in order]
        chunks = 1 + max((action.chunk for action in work), default=0)
        return cls(len(orders), chunks, 1 + max((action.microbatch for action in work), default=0))

    @property
    def results(self) -> int:
        return 3 * self.chunks * self.stages * self.microbatches

    def number(self, kind: Kind, place: StageChunk) -> int:
        """Number of the result of micro batch 0: activations first, then gradients, then dW."""
        part = {"forward": 0, "backward_weight": 2}.get(kind, 1)
        virtual = place.chunk * self.stages + place.stage
        return (part * self.chunks * self.stages + virtual) * self.microbatches

    def row(
        self, kind: Kind, place: StageChunk, seconds: float, transfer: float | Transfer
    ) -> _Row:
        action, gives = Action(kind, 0, place.chunk), self.number(kind, place)
        sender = source(action, stage=place.stage, stages=self.stages, chunks=self.chunks)
        if sender is not None:
            delay = transfer(sender, place) if callable(transfer) else transfer
            return _Row(seconds, self.number(kind, sender), delay, gives)
        if kind == "forward":
            return _Row(seconds, None, 0, gives)
        own: Kind = "backward_input" if kind == "backward_weight" else "forward"
        return _Row(seconds, self.number(own, place), 0, gives)


def replay(
    orders: Iterable[Iterable[Action]], seconds: Seconds, *, transfer: float | Transfer = 0
) -> Timeline:
    """Simulate the actions of stages 0, 1, ...

    seconds: of an action, by (stage, chunk, kind). transfer: seconds of a message, the same for all
    or a function of (sender, receiver). Raises DeadlockError if not all actions can be done.
    """
    played = tuple(map(tuple, orders))
    shape = _Shape.of(played)
    rows = [
        {
            (kind, chunk): shape.row(
                kind, StageChunk(stage, chunk), seconds(stage, chunk, kind), transfer
            )
            for kind, chunk in {(action.kind, action.chunk) for action in order}
        }
        for stage, order in enumerate(played)
    ]
    starts, ends = _play(played, rows, [None] * shape.results)
    return Timeline(played, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _play(
    orders: tuple[Order, ...],
    rows: list[dict[tuple[Kind, int], _Row]],
    done: list[float | None],
) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends by stage. A stage runs until a result is missing, and on once it exists."""
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    waiting: dict[int, int] = {}  # missing result -> the stage that needs it
    called = list(range(len(orders)))
    while called:
        stage = called.pop()
        order, table, began, ended = orders[stage], rows[stage], starts[stage], ends[stage]
        clock = ended[-1] if ended else 0
        for at in range(len(ended), len(order)):
            kind, microbatch, chunk = order[at]
            seconds, needs, delay, gives = table[kind, chunk]
            if needs is not None:
                ready = done[needs + microbatch]
                if ready is None:
                    waiting[needs + microbatch] = stage
                    break
                clock = max(clock, ready + delay)
            began.append(clock)
            clock += seconds
            ended.append(clock)
            done[gives + microbatch] = clock
            if gives + microbatch in waiting:
                called.append(waiting.pop(gives + microbatch))
    _check_all_done(orders, ends)
    return starts, ends


def _check_all_done(orders: tuple[Order, ...], ends: list[list[float]]) -> None:
    waits = [
        f"stage {stage} waits at {show(order[len(done) : len(done) + 1])}"
        for stage, (order, done) in enumerate(zip(orders, ends, strict=True))
        if len(done) < len(order)
    ]
    if waits:
        raise DeadlockError(f"no stage can go on: {', '.join(waits)}; order them as actions() does")
