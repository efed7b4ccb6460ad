"""A timeline of a rank's work in the steps that `launch.profile` names (records/rundir/profile_files.py).

When it is off, it costs one comparison per step. When it is on, a pass costs two readings of the
clock; events are written when the next step begins, outside of all measured times. On CUDA the
readings are events on the stream, which are converted to seconds when they are written.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mpctl.model.pipeline.schedule.orders import Action
from mpctl.records.rundir.profile_files import ProfiledStep, ProfileEvent
from mpctl.spec.base import is_within
from mpctl.train.runtime.activity import Activity
from mpctl.train.runtime.pass_listener import PassListener
from mpctl.train.transport.timing import Collective, SecondsByAxis

Item = TypeVar("Item")
BOOT = Path("/proc/sys/kernel/random/boot_id")
MESSAGES = ("send", "receive")


@dataclass
class StepProfile(PassListener):
    """Records the steps in `steps` (`3, 5-7`; none in an empty text) as lines of the file `path`.

    timer: that of the rank's groups; its clock is used, and it reports collectives. head: the
    rank's part of each line. activity: says which step of the pipeline program is running.
    """

    steps: str = ""
    path: Path = Path()
    head: dict[str, Any] = field(default_factory=dict)
    timer: SecondsByAxis = field(default_factory=SecondsByAxis)
    activity: Activity = field(default_factory=Activity)
    step: int | None = None
    events: list[tuple[ProfileEvent, Any, Any]] = field(default_factory=list)
    begun: list[Any] = field(default_factory=list)

    def begin_step(self, step: int) -> None:
        """Write the events recorded so far, and record from now on if `step` is among `steps`."""
        self.finish()
        if self.steps and is_within(self.steps, step):
            self.step = step
            self.timer.start_clock()
            self.timer.listener = self._collective
            self.begun.append(self.timer.now())

    def end_step(self) -> None:
        """End the step; events until the next step begins are recorded with it."""
        if self.step is not None:
            self._add("step", self.begun.pop())

    def finish(self) -> None:
        """Write the recorded events and stop recording."""
        if self.step is None:
            return
        self.timer.listener = None
        line: ProfiledStep = {**self.head, "step": self.step, "events": self._resolved()}  # type: ignore[typeddict-item]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.step = None
        self.events.clear()
        self.begun.clear()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Enter it around a piece of work, one of profile_files.WORK."""
        return nullcontext() if self.step is None else self._span(name)

    def each(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """The items; records the time that it takes to get each."""
        return items if self.step is None else self._each(name, items)

    def begin(self, action: Action) -> None:
        """A pass begins."""
        if self.step is not None:
            self.begun.append(self.timer.now())

    def end(self, action: Action) -> None:
        """The pass ends."""
        if self.step is not None:
            self._add(action.kind, self.begun.pop(), _place(action))

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        began = self.timer.now()
        yield
        self._add(name, began)

    def _each(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        while True:
            began = self.timer.now()
            try:
                item = next(items)
            except StopIteration:
                return
            self._add(name, began)
            yield item

    def _add(self, name: str, began: Any, more: dict[str, int] | None = None) -> None:
        event: ProfileEvent = {"name": name, "began": 0.0, "ended": 0.0, **(more or {})}  # type: ignore[typeddict-item]
        self.events.append((event, began, self.timer.now()))

    def _collective(self, collective: Collective, began: Any, ended: Any, started: Any) -> None:
        event: ProfileEvent = {
            "name": collective.kind,
            "began": 0.0,
            "ended": 0.0,
            "phase": "start" if started is None else "wait",
            "axis": collective.axis,
            "bytes": collective.bytes,
            "dtype": collective.dtype,
        }
        if started is not None:
            event["started"] = started
        elif (current := self.activity.current) is not None:
            event["of"] = current.action.kind
            event.update(_place(current.action))  # type: ignore[typeddict-item]
            if current.peer is not None and collective.kind in MESSAGES:
                event["peer"] = current.peer.stage
        self.events.append((event, began, ended))

    def _resolved(self) -> list[ProfileEvent]:
        """The events with their times in seconds; an event comes before those that it contains."""
        seconds = self.timer.seconds_at
        for event, began, ended in self.events:
            event["began"], event["ended"] = seconds(began), seconds(ended)
            if "started" in event:
                event["started"] = min(seconds(event["started"]), event["began"])
        events = (event for event, _, _ in self.events)
        return sorted(events, key=lambda event: (event["began"], -event["ended"]))


def _place(action: Action) -> dict[str, int]:
    return {"microbatch": action.microbatch, "chunk": action.chunk}


def clock_name() -> str:
    """A name of this host's clock, the same in all of its processes and on no other host."""
    try:
        return BOOT.read_text("ascii").strip()
    except OSError:
        return platform.node()
