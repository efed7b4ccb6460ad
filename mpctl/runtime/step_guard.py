"""What becomes of a step whose loss or gradient is not finite, or whose loss spikes.

The loss and the gradient norm of a step are results of all-reduces and so the same number on every
rank: all ranks decide alike, without a message of their own. Where a setting may keep an update
from being made, the loss is therefore shared before the update instead of after it.

A loss is a spike when it exceeds `training.spike_factor` times the median of the losses of the last
`training.spike_window` updates; before so many updates none is. A skipped step leaves parameters,
moments and AdamW's count as they are, sends what every step sends, and its batch is not trained on
again. A rollback ends the attempt: the launcher starts again from the newest checkpoint and leaves
out the batches up to the one at fault. PaLM restarted about 100 steps before each spike and skipped
200 to 500 batches, after which the loss did not spike there again (arXiv 2204.02311, section 5.1).

By hand, window 3, factor 2: losses 3, 2, 4 have the median 3, so 6 is no spike and 6.1 is one. If
it is skipped it is not among the last losses of the next step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from mpctl.errors import RunFailed
from mpctl.rundir.rank_files import StepRecord
from mpctl.spec.training import TrainingSpec

Action = Literal["update", "skip", "stop", "rollback"]


class StepRefused(RunFailed):
    """A step was not trained on. rollback: its number where the launcher is to start again from the
    newest checkpoint without its batch, None where the run ends."""

    def __init__(self, words: str, *, is_echo: bool, rollback: int | None) -> None:
        super().__init__(words)
        self.is_echo, self.rollback = is_echo, rollback


@dataclass(frozen=True)
class Judgement:
    """What is to become of a step, and why it is not an ordinary one: `the loss of step 3 is nan`,
    empty for an ordinary one. is_spike: the loss is finite and too large."""

    action: Action
    reason: str = ""
    is_spike: bool = False


@dataclass
class StepGuard:
    """Judges each step of one training. losses: of the last updates; skipped: steps in a row that
    were skipped."""

    training: TrainingSpec
    losses: deque[float] = field(init=False)
    skipped: int = 0

    def __post_init__(self) -> None:
        self.losses = deque(maxlen=self.training.spike_window)

    @property
    def needs_loss(self) -> bool:
        """Whether the loss of a step has to be known before its update."""
        training = self.training
        return training.on_nonfinite != "stop" or training.on_spike not in ("ignore", "stop")

    @property
    def remembers(self) -> bool:
        """Whether a judgement depends on the steps before."""
        return self.training.on_spike != "ignore" or self.training.on_nonfinite == "skip"

    def restore(self, losses: Iterable[float], skipped: int) -> None:
        """Continue after a resumption. losses: of the last updates, oldest first; skipped: steps
        in a row that were skipped before it."""
        self.losses.clear()
        self.losses.extend(losses)
        self.skipped = skipped

    def judge(self, step: int, loss: float | None, norm: float, *, may_overflow: bool) -> Judgement:
        """What is to become of step `step`, from 1. loss: None when it is not known yet; norm: of
        its gradient; may_overflow: in fp16, where a norm that is not finite is an overflow that the
        loss scale deals with."""
        training = self.training
        if loss is not None and not math.isfinite(loss):
            reason = f"the loss of step {step} is {loss}"
            return self._limited(Judgement(training.on_nonfinite, reason))
        if not math.isfinite(norm) and not may_overflow:
            reason = f"the gradient norm of step {step} is {norm}"
            return self._limited(Judgement(training.on_nonfinite, reason))
        if loss is None or training.on_spike == "ignore" or not self._is_spike(loss):
            return Judgement("update")
        reason = (
            f"the loss of step {step} spikes: {loss:.4g} is more than {training.spike_factor:g} "
            f"times {median(self.losses):.4g}, the median of the last {len(self.losses)}"
        )
        return self._limited(Judgement(training.on_spike, reason, True))

    def _is_spike(self, loss: float) -> bool:
        training = self.training
        is_known = len(self.losses) == training.spike_window
        return is_known and loss > training.spike_factor * median(self.losses)

    def made_update(self, loss: float) -> None:
        """Count an update with this loss."""
        self.losses.append(loss)
        self.skipped = 0

    def _limited(self, judgement: Judgement) -> Judgement:
        """Skipping so many steps in a row does not help: the run ends instead."""
        if judgement.action != "skip":
            return judgement
        self.skipped += 1
        most = self.training.max_skipped_steps
        if self.skipped <= most:
            return judgement
        reason = f"{judgement.reason}, after {most} skipped steps in a row"
        return replace(judgement, action="stop", reason=f"{reason} (training.max_skipped_steps)")


def recent_losses(records: Sequence[StepRecord], count: int) -> tuple[list[float], int]:
    """The losses of the last `count` updates, oldest first, and how many steps were skipped after
    the last of them."""
    made = [record for record in records if not record.get("skipped")]
    losses = [record["loss"] for record in made]
    last = made[-1]["step"] if made else 0
    skipped = sum(record["step"] > last for record in records)
    return [loss for loss in losses[-count:] if loss is not None], skipped
