"""A stage's actions with their sends and receives, for a worker to run in order.

All events of a step are put in one global order by time, as replay.py computes it for a backward
that takes twice as long as a forward: an action at its start, a message when it is made. A stage's
program consists of the events of that order in which the stage takes part. From this follows:

- Sender and receiver see their common messages in the same order, counting both directions and all
kinds, so that messages match without tags.
- Blocking sends, which return when they are received, cannot deadlock: the first event of the order
  that is not done can always be done.
- A run that starts sends and receives in this order, and waits for a receive only before the action
  that needs it, cannot hang either, and takes the time that replay.py computes.

With 2 stages of several chunks, activations of the last stage go to stage 0 over the same link as
its gradients; the order covers them too.

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

from mpctl.model.pipeline.placement import StageChunk
from mpctl.model.pipeline.schedule.orders import Action, Kind, actions, show, source, target
from mpctl.model.pipeline.schedule.replay import Timeline, replay
from mpctl.spec.parallel import ScheduleName
from mpctl.spec.schedules import SCHEDULES

Verb = Literal["compute", "send", "receive"]


class Step(NamedTuple):
    """One step of a stage's program.

    verb: "compute" does `action`, "send" sends its result to `peer`, "receive" receives from `peer`
    what it needs. `action` is always one of this stage; at the other end of the message it is the
    same action of `peer.chunk`.
    """

    verb: Verb
    action: Action
    peer: StageChunk | None = None


Program = list[Step]


def spell(steps: Iterable[Step]) -> str:
    """A program as text, such as `<0 F1 >2`.

    That receives from stage 0, runs the forward of micro batch 1 and sends to stage 2.
    """
    marks = {"receive": "<", "send": ">"}
    return " ".join(
        show([step.action]) if step.peer is None else f"{marks[step.verb]}{step.peer.stage}" for step in steps
    )


def program(name: ScheduleName, *, stage: int, stages: int, microbatches: int, chunks: int = 1) -> Program:
    """The program of one stage for one training step; raises ScheduleError."""
    return _Line.of(name, stages, microbatches, chunks).program(stage)


def programs(name: ScheduleName, *, stages: int, microbatches: int, chunks: int = 1) -> list[Program]:
    """The programs of all stages, by stage; raises ScheduleError."""
    line = _Line.of(name, stages, microbatches, chunks)
    return [line.program(stage) for stage in range(stages)]


def transfers(
    name: ScheduleName, *, stages: int, microbatches: int, chunks: int = 1
) -> dict[tuple[int, int], list[Action]]:
    """Messages of one training step by (sender, receiver), in order; raises ScheduleError.

    Each message is named by the action whose result it is.
    """
    found: dict[tuple[int, int], list[Action]] = {}
    every = programs(name, stages=stages, microbatches=microbatches, chunks=chunks)
    for stage, steps in enumerate(every):
        for verb, action, peer in steps:
            if verb == "send" and peer is not None:
                found.setdefault((stage, peer.stage), []).append(action)
    return found


_When = tuple[float, bool, int]  # at one time messages come first: an action may need them


@dataclass(frozen=True, slots=True)
class _Line:
    """All events of a training step in their global order.

    ends: for each stage, when each of its actions ends.
    """

    chunks: int
    is_v: bool
    timeline: Timeline
    ends: tuple[dict[Action, float], ...]

    @classmethod
    def of(cls, name: ScheduleName, stages: int, microbatches: int, chunks: int) -> _Line:
        orders = [
            actions(name, stage=stage, stages=stages, microbatches=microbatches, chunks=chunks)
            for stage in range(stages)
        ]
        is_v = SCHEDULES[name].is_v
        timeline = replay(orders, _usual_seconds, is_v=is_v)
        pairs = zip(timeline.orders, timeline.ends, strict=True)
        return cls(chunks, is_v, timeline, tuple(dict(zip(*pair, strict=True)) for pair in pairs))

    def program(self, stage: int) -> Program:
        return [step for _, step in sorted(self._events(stage), key=itemgetter(0))]

    def _events(self, stage: int) -> Iterator[tuple[_When, Step]]:
        """The steps of a stage with their sort keys (time, is an action, number of the sender).

        The sender's number orders messages of the same time; a sender makes one at a time.
        """
        timeline = self.timeline
        place = {"stage": stage, "stages": len(self.ends), "chunks": self.chunks}
        starts = zip(timeline.orders[stage], timeline.starts[stage], strict=True)
        for action, start in starts:
            yield (start, True, stage), Step("compute", action)
            sender = source(action, **place, is_v=self.is_v)
            if sender is not None and sender.stage != stage:
                sent = self.ends[sender.stage][self._made(action, sender)]
                yield (sent, False, sender.stage), Step("receive", action, sender)
            receiver = target(action, **place, is_v=self.is_v)
            if receiver is not None and receiver.stage != stage:
                yield (self.ends[stage][action], False, stage), Step("send", action, receiver)

    def _made(self, action: Action, sender: StageChunk) -> Action:
        """The action that made what `action` needs; a schedule may split the backward of one of the two alone."""
        ends = self.ends[sender.stage]
        made = Action(action.kind, action.microbatch, sender.chunk)
        if made in ends:
            return made
        other: Kind = "backward" if action.kind == "backward_input" else "backward_input"
        return made._replace(kind=other)


def _usual_seconds(stage: int, chunk: int, kind: Kind) -> int:
    return 2 if kind == "backward" else 1
