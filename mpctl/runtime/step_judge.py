"""What the step guard says of a step, carried out: an update, a skipped step, or a failure.

Judging needs no message: loss and norm are the same numbers on all ranks (step_guard.py). The
failure that ends a run names the rank that it came from, for which all ranks compute the step once
more (nonfinite.py); so parameters must still be those of before the update.

By hand, on_nonfinite `stop`, fp32: a norm of nan raises NotFinite on every rank; in fp16 it is an
overflow, which is not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mpctl.runtime.mesh import Mesh
from mpctl.runtime.nonfinite import GradientInspector, locate_nonfinite
from mpctl.runtime.step_guard import Judgement, StepGuard, StepRefused
from mpctl.runtime.zero.gradients import BucketGradients

Look = Callable[[BucketGradients], None]


@dataclass(frozen=True)
class StepJudge:
    """Judges the steps of one rank.

    is_fp16: whether a norm that is not finite is an overflow, which the loss scale deals with.
    names: returns the name of each parameter. recompute: computes the gradients of the step under
    way once more and calls its argument with each bucket before it is summed.
    """

    guard: StepGuard
    mesh: Mesh
    is_fp16: bool
    names: Callable[[], Mapping[Tensor, str]]
    recompute: Callable[[Look], object]

    def judge(self, step: int, own: Tensor, shared: float | None, norm: float) -> Judgement:
        """What becomes of step `step`, from 1: update or skip. own: this rank's loss; shared: that
        of all ranks, None where it is not known yet. Raises StepRefused where the step ends the run
        or rolls it back."""
        judgement = self.guard.judge(step, shared, norm, may_overflow=self.is_fp16)
        if judgement.action in ("stop", "rollback"):
            raise self._refusal(step, judgement, own, recompute=not judgement.is_spike)
        return judgement

    def require_good(self, step: int, own: Tensor, shared: float) -> None:
        """Judge a step whose loss was shared after its update. Raises StepRefused."""
        judgement = self.guard.judge(step, shared, 0.0, may_overflow=False)
        if judgement.action != "update":
            raise self._refusal(step, judgement, own, recompute=False)

    def _refusal(
        self, step: int, judgement: Judgement, own: Tensor, *, recompute: bool
    ) -> StepRefused:
        """The failure that ends the run on this rank; every rank calls it. recompute: look at the
        gradients of each rank, to find where it came from."""
        rollback = step if judgement.action == "rollback" else None
        if judgement.is_spike:
            return StepRefused(judgement.reason, is_echo=self.mesh.rank > 0, rollback=rollback)
        inspector = GradientInspector(self.names())
        if recompute:
            self.recompute(inspector.look)
        evidence = inspector.evidence(float(own))
        return locate_nonfinite(judgement.reason, self.mesh, evidence, rollback=rollback)
