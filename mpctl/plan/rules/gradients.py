"""Gradients of a trainer that no profile knows: which memory their data type decides.

Trainers hold gradients in float32 or in 16 bits, 4 or 2 bytes a parameter of a rank. Where nobody knows
(`memory.gradients_unknown` of a profile) a plan counts the smaller ones: no layout is refused for memory that
it may not need. This rule says what the others would take, and which key tells.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.units import bytes_text
from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.memory import layout_memory, peak_bytes
from mpctl.plan.rules.check import Check
from mpctl.spec.job import HALVES, JobSpec

KEY = "training.gradient_dtype"


def gradient_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Say what gradients of the other width take, unless the job names theirs."""
    job, training = draft.job, draft.job.training
    is_known = not draft.profile.memory.gradients_unknown or training.gradient_dtype is not None
    if is_known or training.dtype not in HALVES or job.model is None:
        return
    narrow, wide = peaks(job)
    if wide > narrow:
        planned = f"{training.dtype} ones are planned, {bytes_text(narrow)} on the fullest rank"
        others = f"fp32 ones take {bytes_text(wide)}{_lack(job, wide)}"
        message = f"nobody knows the gradients of {draft.profile.name}: {planned}; {others}"
        hint = f"set {KEY} to your trainer's, fp32 or {training.dtype}"
        yield Check("gradients-unknown", "warning", KEY, message, hint)


def peaks(job: JobSpec) -> tuple[int, int]:
    """Return the bytes of the fullest rank with gradients of the training's data type and with float32 ones."""
    narrow, wide = (
        peak_bytes(layout_memory(JobLayout.of(job.model_copy(update={"training": training}))))
        for training in (job.training, job.training.model_copy(update={"gradient_dtype": "fp32"}))
    )
    return narrow, wide


def _lack(job: JobSpec, need: int) -> str:
    return ", which does not fit" if job.cluster.fits(need) is False else ""
