"""The parts of a step's record (rundir/rank_files.py) that an update and a validation add to it,
and what a rank's report says of many steps.

By hand: steps of 10, 5, 5 and 5 ms, of which a rank is 9, 1, 2 and 3 ms in collectives of tp. After
two steps of warming up, its share of communication is the median of 2/5 and 3/5, 0.5.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from mpctl.rundir.rank_files import RankReport, StepRecord
from mpctl.rundir.summary import WARM_UP_STEPS, medians_by_axis

REPORTED_STEPS = 1000  # of the steps of an attempt, the last that its report speaks of


class StepClock:
    """Measures one step, from when it is made: seconds of the clock, and of this process."""

    def __init__(self) -> None:
        self.began, self.cpu_began = time.perf_counter(), time.process_time()
        self.seconds, self.cpu_seconds = 0.0, 0.0

    def stop(self) -> None:
        """The step is over."""
        self.seconds = time.perf_counter() - self.began
        self.cpu_seconds = time.process_time() - self.cpu_began

    def record(self, step: int, loss: float, tokens: int) -> StepRecord:
        """The record of step `step`, from 1, of so many tokens."""
        return {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "tokens": step * tokens,
            "step_seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "tokens_per_second": tokens / self.seconds,
        }


@dataclass(frozen=True)
class UpdateResult:
    """What came of one update.

    grad_norm: before clipping, None where it was not finite; loss_scale: that of the step, None
    unless in fp16; skipped: whether the parameters stayed as they were; skip_reason: why, empty
    for an overflow of fp16.
    """

    grad_norm: float | None
    learning_rate: float
    loss_scale: float | None = None
    skipped: bool = False
    skip_reason: str = ""

    def add(self, record: StepRecord) -> None:
        """Add them to the record of the step."""
        record["grad_norm"] = self.grad_norm
        record["learning_rate"] = self.learning_rate
        if self.loss_scale is not None:
            record["loss_scale"] = self.loss_scale
        if self.skipped:
            record["skipped"] = True
        if self.skip_reason:
            record["skip_reason"] = self.skip_reason


@dataclass(frozen=True)
class ValidationLosses:
    """Mean losses of one validation: over the data's own validation split, and over further corpora
    by name."""

    loss: float
    others: dict[str, float]

    def add(self, record: StepRecord) -> None:
        """Add them to the record of the step after which they were computed."""
        record["validation_loss"] = self.loss
        if self.others:
            record["validation_losses"] = self.others

    def add_initial(self, record: StepRecord) -> None:
        """Add them, of the validation before training, to the record of step 1."""
        record["initial_validation_loss"] = self.loss
        if self.others:
            record["initial_validation_losses"] = self.others


@dataclass
class CommunicationSeconds:
    """How long a rank was in collectives in each of its last REPORTED_STEPS steps.

    steps: the step's duration, and by axis the seconds in collectives; num_seen: steps added.
    """

    steps: deque[tuple[float, dict[str, float]]] = field(
        default_factory=lambda: deque(maxlen=REPORTED_STEPS)
    )
    num_seen: int = 0

    def add(self, record: StepRecord) -> None:
        """Add a step; the first WARM_UP_STEPS count until there are others."""
        if self.num_seen == WARM_UP_STEPS:
            self.steps.clear()
        self.num_seen += 1
        self.steps.append((record["step_seconds"], record.get("communication_seconds", {})))

    def report(self, report: RankReport) -> None:
        """Add the medians to a rank's report; nothing where there was no step."""
        if not self.steps:
            return
        by_axis = medians_by_axis([seconds for _, seconds in self.steps])
        report["communication_seconds"] = by_axis or {}
        report["communication_share"] = median(
            sum(seconds.values()) / duration for duration, seconds in self.steps
        )
