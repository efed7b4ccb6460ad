"""A stage's actions with their sends and receives, for a worker to run from first to last.

All events of a step stand in one line: an action where it starts, a message where it is made, as
replay.py has them when a backward takes two forwards. A stage's program is that line less what is
other stages' business. So the two ends of a message meet it in the same place among all that they
share: between any two stages messages match in order, over both directions and kinds taken
together, without tags; and blocking sends that wait for their receive cannot deadlock, since the
foremost event of the line can always be done. Nor can a looser run hang: receives and sends started
in this order, each receive waited for before its action; it takes replay.py's time. With 2 stages
and chunks, the last stage's activations go round to stage 0 on the link of the gradients: the line
orders them too.

>>> for stage in range(2):
...     print(spell(program("1f1b", stage=stage, stages=2, microbatches=2)))
F0 >1 F1 >1 <1 B0 <1 B1
<0 F0 <0 B0 >0 F1 B1 >0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple

from mpctl.pipeline.schedule.orders import Action, Kind, StageChunk, actions, show, source, target
from mpctl.pipeline.schedule.replay import Timeline, replay
from mpctl.spec.parallel import ScheduleName

Verb = Literal["compute", "send", "receive"]


class Step(NamedTuple):
    """compute: do `action`. send: its result to `peer`. receive: what it needs from `peer`.

    `action` is always the stage's own; the other end's is the same of `peer.chunk`.
    """

    verb: Verb
    action: Action
    peer: StageChunk | None = None


Program = list[Step]


def spell(steps: Iterable[Step]) -> str:
    """`<0 F1 >2`: from stage 0, forward of micro batch 1, to stage 2."""
    marks = {"receive": "<", "send": ">"}
    return " ".join(
        show([step.action]) if step.peer is None else f"{marks[step.verb]}{step.peer.stage}"
        for step in steps
    )


def program(
    name: ScheduleName, *, stage: int, stages: int, microbatches: int, chunks: int = 1
) -> Program:
    """What `stage` runs in one step; raises ScheduleError."""
    return _Line.of(name, stages, microbatches, chunks).program(stage)


def programs(
    name: ScheduleName, *, stages: int, microbatches: int, chunks: int = 1
) -> list[Program]:
    """The programs of every stage; raises ScheduleError."""
    line = _Line.of(name, stages, microbatches, chunks)
    return [line.program(stage) for stage in range(stages)]


def transfers(
    name: ScheduleName, *, stages: int, microbatches: int, chunks: int = 1
) -> dict[tuple[int, int], list[Action]]:
    """Messages of one step from stage to stage, in order, each as the action that makes it."""
    found: dict[tuple[int, int], list[Action]] = {}
    every = programs(name, stages=stages, microbatches=microbatches, chunks=chunks)
    for stage, steps in enumerate(every):
        for verb, action, peer in steps:
            if verb == "send" and peer is not None:
                found.setdefault((stage, peer.stage), []).append(action)
    return found


_When = tuple[float, bool, int]  # a message before what starts then: it may be what that needs


@dataclass(frozen=True, slots=True)
class _Line:
    """Where every event of a step stands in the one line of them all."""

    chunks: int
    timeline: Timeline
    ends: tuple[dict[Action, float], ...]

    @classmethod
    def of(cls, name: ScheduleName, stages: int, microbatches: int, chunks: int) -> _Line:
        orders = [
            actions(name, stage=stage, stages=stages, microbatches=microbatches, chunks=chunks)
            for stage in range(stages)
        ]
        timeline = replay(orders, _usual_seconds)
        pairs = zip(timeline.orders, timeline.ends, strict=True)
        return cls(chunks, timeline, tuple(dict(zip(*pair, strict=True)) for pair in pairs))

    def program(self, stage: int) -> Program:
        return [step for _, step in sorted(self._events(stage), key=itemgetter(0))]

    def _events(self, stage: int) -> Iterator[tuple[_When, Step]]:
        """A sender makes one message at a time: its number parts messages of the same time."""
        timeline, stages = self.timeline, len(self.ends)
        starts = zip(timeline.orders[stage], timeline.starts[stage], strict=True)
        for action, start in starts:
            yield (start, True, stage), Step("compute", action)
            sender = source(action, stage=stage, stages=stages, chunks=self.chunks)
            if sender is not None:
                made = Action(action.kind, action.microbatch, sender.chunk)
                sent = self.ends[sender.stage][made]
                yield (sent, False, sender.stage), Step("receive", action, sender)
            receiver = target(action, stage=stage, stages=stages, chunks=self.chunks)
            if receiver is not None:
                yield (self.ends[stage][action], False, stage), Step("send", action, receiver)


def _usual_seconds(stage: int, chunk: int, kind: Kind) -> int:
    return 2 if kind == "backward" else 1
