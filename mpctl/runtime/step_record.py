"""The parts of a step's record (rundir/rank_files.py) that an update and a validation add to it."""

from __future__ import annotations

from dataclasses import dataclass

from mpctl.rundir.rank_files import StepRecord


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
