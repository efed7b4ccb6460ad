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
from mpctl.runtime.step_record import UpdateResult
from mpctl.runtime.zero.gradients import GradientBuffer
from mpctl.spec.training import TrainingSpec


@dataclass
class Updater:
    """Makes the updates of one rank. loss_scale: None unless in fp16."""

    training: TrainingSpec
    buffer: GradientBuffer
    optimizer: Optimizer
    loss_scale: LossScale | None
    profile: StepProfile

    @property
    def scale(self) -> float:
        """What the losses of the step are multiplied by."""
        return self.loss_scale.value if self.loss_scale else 1.0

    def norm(self) -> Tensor:
        """The norm of the step's gradient before clipping, a float64 scalar on the device."""
        with self.profile.span("norm"):
            return self.buffer.norm() / self.scale

    def make(self, step: int, norm: float) -> UpdateResult:
        """Update the parameters in step `step`, from 0, by a gradient of this finite norm."""
        self.buffer.scale(clip_factor(norm, self.training.clip_norm) / self.scale)
        with self.profile.span("optimizer"):
            self.optimizer.step(step)
        return self.made(step, norm)

    def give(self, step: int, norm: Tensor) -> None:
        """Have the device update the parameters if the norm is finite; to be followed by `made`,
        or by `left_out` and what the step then is, once the host knows the norm."""
        bound = self.training.clip_norm
        factor = None
        if bound or self.loss_scale:
            clip = torch.where(norm > bound, bound / norm, 1.0) if bound else torch.ones_like(norm)
            factor = clip / self.scale
        with self.profile.span("optimizer"):
            self.optimizer.step(step, factor=factor, is_bad=~norm.isfinite())

    def made(self, step: int, norm: float) -> UpdateResult:
        """The step updated the parameters."""
        used = self.scale
        if self.loss_scale:
            self.loss_scale.went_well()
        return self._result(step, norm, used)

    def left_out(self) -> None:
        """The device left out the update that it was given."""
        self.optimizer.updates -= 1

    def skip(self, step: int, norm: float, reason: str) -> UpdateResult:
        """The step changes nothing, but sends what every step sends."""
        self.optimizer.publish()
        return self.skipped(step, norm, reason)

    def skipped(self, step: int, norm: float, reason: str) -> UpdateResult:
        """The step changed nothing. Raises FloatingPointError where fp16 overflows at the smallest
        loss scale."""
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
