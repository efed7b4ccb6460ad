"""The loss scale of fp16, whose smallest number is 6e-8: small gradients would be 0.

The loss is multiplied by S before backward and gradients divided by it before use (arXiv
1710.03740, section 3.2). A norm that is not finite says that S was too large: the step changes
nothing and S is halved; after `window` steps that went well it is doubled. All ranks know the same
norm, so all decide alike, without a message.

By hand, window 2, from S = 8: overflow 4, well 4, well 8, overflow 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpctl.spec.training import TrainingSpec


@dataclass
class LossScale:
    """value: S; well: steps since it changed; skipped: steps in all that changed nothing."""

    value: float
    window: int
    least: float
    well: int = 0
    skipped: int = 0

    @classmethod
    def of(cls, training: TrainingSpec) -> LossScale | None:
        """None where the dtype needs none."""
        if training.dtype != "fp16":
            return None
        return cls(training.loss_scale, training.loss_scale_window, training.min_loss_scale)

    def overflowed(self) -> None:
        """Raises FloatingPointError when there is no smaller scale to try."""
        self.skipped += 1
        self.value, self.well = self.value / 2, 0
        if self.value < self.least:
            raise FloatingPointError(
                f"gradients overflow fp16 even at a loss scale of {2 * self.value:g}, and "
                f"training.min_loss_scale is {self.least:g}: training has diverged or fp16 is too "
                "narrow for it (lower training.learning_rate, or use training.dtype bf16)"
            )

    def went_well(self) -> None:
        """Count a step without overflow; after `window` of them in a row the scale is doubled."""
        self.well += 1
        if self.well == self.window:
            self.value, self.well = 2 * self.value, 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, by name."""
        return {"scale": self.value, "well": self.well, "skipped": self.skipped}

    def load(self, state: Mapping[str, float]) -> None:
        """From a checkpoint; one of another dtype says nothing."""
        if state:
            self.value, self.well = state["scale"], int(state["well"])
            self.skipped = int(state["skipped"])
