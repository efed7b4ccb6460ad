"""The step log of a rank: how long each of its last steps took, and how much of it was its own.

It is in the memory that the rank shares with the agent of its host (breadcrumb.py), so that the
launcher learns once a second what every rank spends its steps on, without a message between ranks.
`run/launch/stragglers.py` and `run/launch/slow_links.py` judge by it.

Of each step a rank logs its length, the part in which it computed by itself (the length without the
time in collectives and in messages between stages, train/transport/timing.py), the processor time of its
process, and the time in the messages of each of its groups. The first steps of an attempt, which
import and compile, are left out; a step during which the rank wrote a checkpoint is marked, as that
costs some ranks more than others.

Layout, in 64-bit little-endian integers: bytes that the last step sent in each of MAX_GROUPS groups
(in the order of the collective log), then ROWS rows, step s in row s % ROWS: the step (0: empty or
being written), its microseconds, those of computing (-1: marked), those of processor time, and
those in each of MAX_GROUPS groups.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from mpctl.records.rundir.collective_log import MAX_GROUPS

ROWS = 64
"""More than WINDOW, since hosts report up to a second apart: steps of 25 ms still have WINDOW steps
in common."""
WINDOW = 20
"""Steps over which ranks are compared, and medians are taken."""
ROW = 4 + MAX_GROUPS
STEP_LOG_BYTES = 8 * (MAX_GROUPS + ROWS * ROW)
NOT_COMPARED = -1


class StepLog:
    """The log of one rank, written by that rank. memory: STEP_LOG_BYTES of zeros at a multiple of 8
    bytes, in the rank's breadcrumb."""

    def __init__(self, memory: memoryview) -> None:
        self.words = memory.cast("q")

    def add(
        self,
        step: int,
        *,
        seconds: float,
        computing: float | None,
        processor: float,
        waits: Mapping[int, float],
        sizes: Mapping[int, int],
    ) -> None:
        """Log a step that has ended. seconds: its length; computing: the rank's own part of it,
        None where it cannot be compared; processor: processor time; waits, sizes: seconds in the
        messages of each group and their bytes, by the group's number in the collective log."""
        own = NOT_COMPARED if computing is None else max(0, round(1e6 * computing))
        row = [0, round(1e6 * seconds), own, round(1e6 * processor), *[0] * MAX_GROUPS]
        for group, spent in waits.items():
            if group >= 0:
                row[4 + group] = round(1e6 * spent)
                self.words[group] = sizes.get(group, 0)
        at = MAX_GROUPS + step % ROWS * ROW
        self.words[at] = 0
        self.words[at : at + ROW] = array("q", row)
        self.words[at] = step  # last: then the row is complete


@dataclass(frozen=True)
class StepTimes:
    """The last steps of a rank, in microseconds.

    last: the newest step, 0 for none; computing: of the consecutive steps that end with it, oldest
    first, NOT_COMPARED where it does not count. Medians over the last WINDOW of them: seconds as
    `length`, processor time, and the time in the messages of each group, in the order of the
    collective log. sizes: bytes of these messages in the last step.
    """

    last: int = 0
    computing: tuple[int, ...] = ()
    length: int = 0
    processor: int = 0
    waits: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def steps(self) -> range:
        """The numbers of the steps in `computing`."""
        return range(self.last - len(self.computing) + 1, self.last + 1)

    @property
    def is_full(self) -> bool:
        """Whether the medians are over WINDOW steps."""
        return len(self.computing) >= WINDOW

    def of(self, step: int) -> int:
        """Return the computing time of a step in `steps`."""
        return self.computing[step - self.steps.start]

    def window(self, steps: range) -> tuple[int, ...]:
        """Return the computing times of consecutive steps, all in `self.steps`."""
        first = self.steps.start
        return self.computing[steps.start - first : steps.stop - first]


def read_step_times(content: bytes | memoryview, groups: int) -> StepTimes:
    """The times from STEP_LOG_BYTES of a breadcrumb; groups: how many the collective log has. Empty
    where they are cut."""
    if len(content) < STEP_LOG_BYTES:
        return StepTimes()
    words = array("q", bytes(content[:STEP_LOG_BYTES]))
    rows = list(_newest_rows(words))
    if not rows:
        return StepTimes()
    recent, last = rows[:WINDOW], rows[0][0]
    medians = [round(median(column)) for column in zip(*(row[1:] for row in recent), strict=True)]
    computing = tuple(row[2] for row in reversed(rows))
    sizes, waits = tuple(words[:groups]), tuple(medians[3 : 3 + groups])
    return StepTimes(last, computing, medians[0], medians[2], waits, sizes)


def _newest_rows(words: array[int]) -> Iterator[array[int]]:
    """The rows of consecutive steps up to the newest, newest first."""
    rows = {words[at]: words[at : at + ROW] for at in range(MAX_GROUPS, len(words), ROW)}
    step = max(rows, default=0)
    while step > 0 and step in rows:
        yield rows[step]
        step -= 1
