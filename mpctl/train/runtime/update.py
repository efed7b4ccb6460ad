"""One update: the gradient's norm, clipping, the optimizer's step, or a step that changes nothing.

Gradients are multiplied by min(1, bound / norm) (arXiv 1211.5063) over the loss scale of fp16. If
the norm is not finite, parameters, moments and AdamW's count must not change.

How that is decided depends on the device. On a CPU the host has the norm, and skips the step. On a
GPU the host would have to wait for it, with the device idle until the optimizer's kernels follow.
So there the step is always launched, with the decision as tensors on the device: AdamW divides by
`grad_scale` and changes nothing if `found_inf` is 1. The host learns of it when it reads the step's
figures (step_record.py). Both multiply by the same factor, a CPU in a separate pass.

The smallest number of fp16 is 6e-8: small gradients would be 0. The loss is multiplied by S before
backward and gradients divided by it before use (arXiv 1710.03740, section 3.2). If the norm is not
finite, S was too large: the step changes nothing and S is halved; after `window` steps without
overflow it is doubled, up to LARGEST_SCALE. All ranks are given the same bits of the norm
(step_record.py), so all decide the same without a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from mpctl.spec.training import TrainingSpec
from mpctl.train.runtime.optimizer import Optimizer, learning_rate
from mpctl.train.runtime.profile import StepProfile
from mpctl.train.runtime.step_guard import StepDecision
from mpctl.train.runtime.zero.gradients import GradientBuffer


class UpdateResult(TypedDict):
    """The result of one update, as fields of a StepRecord."""

    grad_norm: float | None
    learning_rate: float
    loss_scale: NotRequired[float]
    skipped: NotRequired[bool]
    skip_reason: NotRequired[str]


class Updater:
    """Makes the updates of one rank. loss_scale: None unless in fp16; runs_ahead: whether the
    device runs asynchronously to the host."""

    def __init__(
        self,
        training: TrainingSpec,
        buffer: GradientBuffer,
        optimizer: Optimizer,
        profile: StepProfile,
        *,
        runs_ahead: bool,
    ) -> None:
        self.training, self.buffer, self.optimizer = training, buffer, optimizer
        self.profile, self.runs_ahead = profile, runs_ahead
        self.loss_scale = LossScale.of(training)

    @property
    def scale(self) -> float:
        """The factor of the step's losses."""
        return self.loss_scale.value if self.loss_scale else 1.0

    def norm(self) -> Tensor:
        """The norm of the step's gradient before clipping, a float64 scalar on the device, equal on
        all ranks up to rounding."""
        with self.profile.span("norm"):
            return self.buffer.norm() / self.scale

    def step(self, step: int, norm: Tensor, known: float, decision: StepDecision) -> UpdateResult:
        """Update the parameters in step `step`, from 0, or skip the step if fp16 overflowed or the
        decision says so. known: the value of the norm on the host."""
        if not _is_made(known, decision):
            self.optimizer.publish()  # unchanged values, so that every step sends the same
        elif self.runs_ahead:
            self.step_async(step, norm)
        else:
            self.buffer.scale(clip_factor(known, self.training.clip_norm) / self.scale)
            with self.profile.span("optimizer"):
                self.optimizer.step(step)
        return self.result(step, known, decision)

    def step_async(self, step: int, norm: Tensor) -> None:
        """Have the device update the parameters in step `step`, from 0, if the norm is finite;
        `resolve` and `result` follow once the host knows it."""
        bound = self.training.clip_norm
        factor = None
        if bound or self.loss_scale:
            clip = torch.where(norm > bound, bound / norm, 1.0) if bound else torch.ones_like(norm)
            factor = clip / self.scale
        with self.profile.span("optimizer"):
            self.optimizer.step(step, factor=factor, is_bad=~norm.isfinite())

    def resolve(self, norm: float) -> None:
        """Do not count the update of `step_async` if the device has not made it."""
        if not math.isfinite(norm):
            self.optimizer.updates -= 1

    def result(self, step: int, norm: float, decision: StepDecision) -> UpdateResult:
        """The result of step `step`, from 0; also updates the loss scale for the next step."""
        is_made, used = _is_made(norm, decision), self.scale
        if self.loss_scale and is_made:
            self.loss_scale.went_well()
        elif self.loss_scale and not math.isfinite(norm):
            self.loss_scale.overflowed()
        result: UpdateResult = {
            "grad_norm": norm if math.isfinite(norm) else None,
            "learning_rate": learning_rate(self.training, step),
        }
        if self.loss_scale:
            result["loss_scale"] = used
        if not is_made:
            result["skipped"] = True
            if decision.reason:
                result["skip_reason"] = decision.reason
        return result


def _is_made(norm: float, decision: StepDecision) -> bool:
    return math.isfinite(norm) and decision.action == "update"


def clip_factor(norm: float, bound: float) -> float:
    """The factor that reduces a norm to at most `bound`; a bound of 0 means no limit."""
    return bound / norm if 0 < bound < norm else 1.0


LARGEST_SCALE = 2.0**127
"""The largest power of two in float32. Gradients that are 0 for long never overflow, so S would
double until it is infinite; then 0 S is NaN, and halving it changes nothing."""


@dataclass
class LossScale:
    """value: S; well: steps since it changed; skipped: total number of skipped steps."""

    value: float
    window: int
    least: float
    well: int = 0
    skipped: int = 0

    @classmethod
    def of(cls, training: TrainingSpec) -> LossScale | None:
        """Return the loss scale of fp16; None for other dtypes."""
        if training.dtype != "fp16":
            return None
        return cls(training.loss_scale, training.loss_scale_window, training.min_loss_scale)

    def overflowed(self) -> None:
        """Halve the scale. Raises FloatingPointError if it is at its minimum."""
        self.skipped += 1
        self.value, self.well = self.value / 2, 0
        if self.value < self.least:
            raise FloatingPointError(
                f"gradients overflow fp16 even at a loss scale of {2 * self.value:g}, and "
                f"training.min_loss_scale is {self.least:g}: training has diverged or fp16 is too "
                "narrow for it (lower training.learning_rate, or use training.dtype bf16)"
            )

    def went_well(self) -> None:
        """Count a step without overflow; after `window` consecutive ones the scale is doubled."""
        self.well += 1
        if self.well == self.window:
            self.value, self.well = min(2 * self.value, LARGEST_SCALE), 0

    def state(self) -> dict[str, float]:
        """The values to save in a checkpoint, by name."""
        return {"scale": self.value, "well": self.well, "skipped": self.skipped}

    def load(self, state: Mapping[str, float]) -> None:
        """Restore from a checkpoint; one of another dtype has no values for it. Raises ValueError if only
        some are there."""
        if state:
            if lacking := sorted(self.state().keys() - state.keys()):
                raise ValueError(f"loss_scale has no {', '.join(lacking)}")
            self.value, self.well = state["scale"], int(state["well"])
            self.skipped = int(state["skipped"])
