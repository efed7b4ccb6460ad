"""Decide what to do with a step if its loss or gradient is not finite or its loss spikes.

The loss and the gradient norm of a step come from all-reduces and so are the same on every rank:
all ranks make the same decision, without a message. If a setting may prevent an update, the loss is
all-reduced before the update instead of after it.

A loss is a spike when it exceeds `training.spike_factor` times the median of the losses of the last
`training.spike_window` updates; before that many updates no loss is a spike. A skipped step does
not change parameters, moments and AdamW's count, sends the same messages as every step, and its
batch is not trained on again. A rollback ends the attempt: the launcher restarts from the newest
checkpoint and skips the batches up to and including the bad one. PaLM restarted about 100 steps
before each spike and skipped 200 to 500 batches, after which the loss did not spike there again
(arXiv 2204.02311, section 5.1).

A failure that ends the run names the rank that caused it. The sums over replicas and stages spread
one rank's NaN or infinity to all others, so the ranks compute the step again, from the same samples
and dropout masks, with the parameters from before the update, and each checks its local gradients
before they are summed. A normal step has no extra cost. The rank at fault records its failure at
once, the others a moment later, so that the launcher does not end it before its record is on disk.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from mpctl.core.errors import RunFailed
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.spec.training import TrainingSpec
from mpctl.train.runtime.mesh import Mesh
from mpctl.train.runtime.zero.gradients import BucketGradients

Action = Literal["update", "skip", "stop", "rollback"]


class StepRefused(RunFailed):
    """A step made no update and ends the attempt. rollback: the step's number if the launcher is to
    restart from the newest checkpoint without its batch, None if the run ends."""

    def __init__(self, words: str, *, is_secondary: bool, rollback: int | None) -> None:
        super().__init__(words)
        self.is_secondary, self.rollback = is_secondary, rollback


@dataclass(frozen=True)
class StepDecision:
    """Decision on a step. reason: such as `the loss of step 3 is nan`, empty for a normal step.
    is_spike: the loss is finite but too large."""

    action: Action
    reason: str = ""
    is_spike: bool = False


class StepGuard:
    """Decides about each step of a training. losses: those of the last updates; skipped: number of
    consecutive steps skipped."""

    def __init__(self, training: TrainingSpec) -> None:
        self.training, self.skipped = training, 0
        self.losses: deque[float] = deque(maxlen=training.spike_window)

    @property
    def needs_loss(self) -> bool:
        """Whether the loss of a step must be known before its update."""
        training = self.training
        return training.on_nonfinite != "stop" or training.on_spike not in ("ignore", "stop")

    @property
    def remembers(self) -> bool:
        """Whether a decision depends on earlier steps."""
        return self.training.on_spike != "ignore" or self.training.on_nonfinite == "skip"

    def restore(self, losses: Iterable[float], skipped: int) -> None:
        """Continue after a resumption. losses: those of the last updates, oldest first; skipped:
        number of consecutive steps skipped before it."""
        self.losses.clear()
        self.losses.extend(losses)
        self.skipped = skipped

    def check(self, step: int, loss: float | None, norm: float, *, may_overflow: bool) -> StepDecision:
        """Decide what to do with step `step`, counted from 1. loss: None if not known yet; norm: of
        the gradient; may_overflow: in fp16, where the loss scale handles a norm that is not finite.
        """
        training = self.training
        if loss is not None and not math.isfinite(loss):
            reason = f"the loss of step {step} is {loss}"
            return self._limited(StepDecision(training.on_nonfinite, reason))
        if not math.isfinite(norm) and not may_overflow:
            reason = f"the gradient norm of step {step} is {norm}"
            return self._limited(StepDecision(training.on_nonfinite, reason))
        is_known = loss is not None and len(self.losses) == training.spike_window
        if training.on_spike == "ignore" or loss is None or not is_known:
            return StepDecision("update")
        if loss <= training.spike_factor * median(self.losses):
            return StepDecision("update")
        reason = (
            f"the loss of step {step} spikes: {loss:.4g} is more than {training.spike_factor:g} "
            f"times {median(self.losses):.4g}, the median of the last {len(self.losses)}"
        )
        return self._limited(StepDecision(training.on_spike, reason, True))

    def made_update(self, loss: float) -> None:
        """Count an update with this loss."""
        self.losses.append(loss)
        self.skipped = 0

    def _limited(self, decision: StepDecision) -> StepDecision:
        """After too many consecutive skipped steps the run ends instead."""
        if decision.action != "skip":
            return decision
        self.skipped += 1
        most = self.training.max_skipped_steps
        if self.skipped <= most:
            return decision
        reason = f"{decision.reason}, after {most} skipped steps in a row"
        return replace(decision, action="stop", reason=f"{reason} (training.max_skipped_steps)")


def recent_losses(records: Sequence[StepRecord], count: int) -> tuple[list[float], int]:
    """The losses of the last `count` updates, oldest first, and how many steps a decision skipped
    after the last of them: an overflow of fp16, which has no reason, does not count."""
    made = [record for record in records if not record.get("skipped")]
    losses = [record["loss"] for record in made]
    last = made[-1]["step"] if made else 0
    skipped = sum(record["step"] > last and "skip_reason" in record for record in records)
    return [loss for loss in losses[-count:] if loss is not None], skipped


TEXT_BYTES = 200
CAUSE_FIRST_SECONDS = 2.0
NOTHING, PARAMETER, LOSS, GRADIENT = 0, 1, 2, 3


class NotFinite(StepRefused):
    """A sum over the ranks is not finite; is_secondary: another rank caused it."""


@dataclass
class GradientInspector:
    """Finds values on one rank that are not finite. names: the name of each of its parameters;
    bad_gradients: names of those whose gradient is not finite."""

    names: Mapping[Tensor, str]
    bad_gradients: list[str] = field(default_factory=list)

    def look(self, store: BucketGradients) -> None:
        """Called with each bucket before it is summed, in the order of backward."""
        if store.full is None or self.bad_gradients:
            return
        pairs = zip(store.shard.parameters, store.shard.views(store.full), strict=True)
        self.bad_gradients += [self.names[p] for p, view in pairs if not _is_finite(view)]

    def evidence(self, loss: float) -> tuple[int, str]:
        """Return the fault on this rank: parameters, else the loss, else gradients."""
        bad = [name for p, name in self.names.items() if _has_memory(p) and not _is_finite(p)]
        if bad:
            return PARAMETER, f"its parameter {bad[0]} is not finite"
        named = self.bad_gradients
        gradient = f"its gradient of {named[0]} is not finite" if named else ""
        if not math.isfinite(loss):
            return LOSS, f"its loss is {loss}" + (f", and {gradient}" if gradient else "")
        return (GRADIENT, gradient) if gradient else (NOTHING, "")


def refusal(decision: StepDecision, step: int, mesh: Mesh, find: Callable[[], tuple[int, str]]) -> StepRefused:
    """The exception for this rank to raise if step `step` ends the run or rolls it back; all ranks
    call it together. find: returns what is wrong on this rank, as `GradientInspector.evidence`."""
    what, rollback = decision.reason, step if decision.action == "rollback" else None
    if decision.is_spike:
        return StepRefused(what, is_secondary=mesh.rank > 0, rollback=rollback)
    by_rank = _share_evidence(mesh, find())
    ranked = sorted((_order(mesh, rank, kind), rank) for rank, (kind, _) in enumerate(by_rank) if kind)
    if not ranked:
        none = "of each rank by itself, loss and gradients are finite when computed once more"
        return NotFinite(f"{what}: {none}", is_secondary=False, rollback=rollback)
    rank = ranked[0][1]
    if rank != mesh.rank:
        time.sleep(CAUSE_FIRST_SECONDS)
    words = f"{what}: first on rank {rank}, {by_rank[rank][1]}"
    return NotFinite(words, is_secondary=rank != mesh.rank, rollback=rollback)


def _order(mesh: Mesh, rank: int, kind: int) -> tuple[int, int]:
    """Sort key: parameters before losses before gradients; gradients of the last stage first, since
    backward passes them on to the earlier stages."""
    return kind, -mesh.topology.coords(rank)["pp"]


def _share_evidence(mesh: Mesh, evidence: tuple[int, str]) -> list[tuple[int, str]]:
    """Every rank's evidence, by rank, sent as one row each: a byte for its kind, then its text."""
    kind, text = evidence
    row = bytes([kind]) + text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    table = torch.zeros(mesh.world.size, len(row), dtype=torch.float32)
    table[mesh.rank] = torch.tensor(list(row), dtype=torch.float32)
    rows = mesh.world.all_reduce(table.to(mesh.device)).to(torch.uint8).tolist()
    return [(r[0], bytes(r[1:]).rstrip(b"\0").decode(errors="replace")) for r in rows]


def _has_memory(tensor: Tensor) -> bool:
    """Whether the tensor has memory: at ZeRO 3 parameters have none between layers."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
