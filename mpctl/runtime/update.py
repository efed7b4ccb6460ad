"""One update: the gradient's norm, clipping, the optimizer's step, or a step that changes nothing.

Gradients are multiplied by min(1, bound / norm) (arXiv 1211.5063) over the loss scale of fp16. A
norm that is not finite must leave parameters, moments and AdamW's count as they are.

Who decides that depends on the device. On a CPU the host has the norm, and skips the step. On a GPU
it would have to wait for it, with the device idle until the optimizer's kernels follow. There the
step is given to the device in any case, with what decides about it as numbers on the device: AdamW
divides by `grad_scale` and changes nothing where `found_inf` is 1. The host learns of it when it
reads the step's figures (status.py). Both ways multiply by the same factor, a CPU in a pass of its
own.

By hand, norm 4, bound 1, loss scale 2: the norm of the gradients as they are is 8, the factor 1/8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mpctl.runtime.loss_scale import LossScale
from mpctl.runtime.lr_schedule import learning_rate
from mpctl.runtime.optimizer import Optimizer
from mpctl.runtime.profile import StepProfile
from mpctl.runtime.status import StepStatus
from mpctl.runtime.step_judge import StepJudge
from mpctl.runtime.step_record import UpdateResult
from mpctl.runtime.zero.gradients import GradientBuffer
from mpctl.spec.training import TrainingSpec


@dataclass
class Updater:
    """Makes the updates of one rank. loss_scale: None unless in fp16; judge: says what becomes of a
    step; runs_ahead: whether the device works on while the host goes on."""

    training: TrainingSpec
    buffer: GradientBuffer
    optimizer: Optimizer
    loss_scale: LossScale | None
    profile: StepProfile
    judge: StepJudge
    runs_ahead: bool = False

    @property
    def scale(self) -> float:
        """What the losses of the step are multiplied by."""
        return self.loss_scale.value if self.loss_scale else 1.0

    def norm(self) -> Tensor:
        """The norm of the step's gradient before clipping, a float64 scalar on the device."""
        with self.profile.span("norm"):
            return self.buffer.norm() / self.scale

    def decide(
        self, step: int, own: Tensor, norm: Tensor, status: StepStatus | None
    ) -> UpdateResult:
        """Update the parameters in step `step`, from 0, or skip the step where fp16 overflowed or
        the guard says so. The norm is the same number on every rank, so that all decide alike.

        own: this rank's loss; status: of all ranks, None where it is shared after the update.
        Raises StepRefused where the step ends the run.
        """
        known = float(norm) if status is None else status.norm
        shared = None if status is None else status.loss
        judgement = self.judge.judge(step + 1, own, shared, known)
        if math.isfinite(known) and judgement.action == "update":
            self._make(step, norm, known)
            return self._made(step, known)
        self.optimizer.publish()  # unchanged values: a skipped step sends what every step sends
        return self._skipped(step, known, judgement.reason)

    def _make(self, step: int, norm: Tensor, known: float) -> None:
        if self.runs_ahead:
            self.give(step, norm)
            return
        self.buffer.scale(clip_factor(known, self.training.clip_norm) / self.scale)
        with self.profile.span("optimizer"):
            self.optimizer.step(step)

    def give(self, step: int, norm: Tensor) -> None:
        """Have the device update the parameters in step `step`, from 0, if the norm is finite;
        `find_out` follows once the host knows it."""
        bound = self.training.clip_norm
        factor = None
        if bound or self.loss_scale:
            clip = torch.where(norm > bound, bound / norm, 1.0) if bound else torch.ones_like(norm)
            factor = clip / self.scale
        with self.profile.span("optimizer"):
            self.optimizer.step(step, factor=factor, is_bad=~norm.isfinite())

    def find_out(self, step: int, own: Tensor, norm: float) -> UpdateResult:
        """What became of the update that was given to the device. Raises StepRefused where the step
        ends the run."""
        if math.isfinite(norm):
            return self._made(step, norm)
        self.optimizer.updates -= 1  # the device left it out
        judgement = self.judge.judge(step + 1, own, None, norm)
        return self._skipped(step, norm, judgement.reason)

    def _made(self, step: int, norm: float) -> UpdateResult:
        used = self.scale
        if self.loss_scale:
            self.loss_scale.went_well()
        return self._result(step, norm, used)

    def _skipped(self, step: int, norm: float, reason: str) -> UpdateResult:
        used = self.scale
        if self.loss_scale and not math.isfinite(norm):
            self.loss_scale.overflowed()
        return self._result(step, norm, used, is_skipped=True, reason=reason)

    def _result(
        self, step: int, norm: float, used: float, *, is_skipped: bool = False, reason: str = ""
    ) -> UpdateResult:
        return UpdateResult(
            norm if math.isfinite(norm) else None,
            learning_rate(self.training, step),
            used if self.loss_scale else None,
            is_skipped,
            reason,
        )


def clip_factor(norm: float, bound: float) -> float:
    """The factor that reduces a norm to at most `bound`; a bound of 0 means none."""
    return bound / norm if 0 < bound < norm else 1.0
