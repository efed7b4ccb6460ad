"""What all ranks tell each other once a step, in one small all-reduce over the world.

A vector of float64: the loss (the sum over its samples from each rank of a last stage that
`reports_loss`: tp rank 0, or of a grid one rank for each of its parts of the samples), whether a
stop was requested, and every rank's peak memory in its own slot. It is how a stop reaches all ranks
at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mpctl.layout.limits import STATUS_FIELDS
from mpctl.runtime.mesh import Mesh


@dataclass(frozen=True)
class StepStatus:
    """loss: this rank's share before `reduce_status`, the sum after it; stop: whether this rank,
    and after it any rank, is to stop; peak_memory: bytes of this rank; memory: of every rank."""

    loss: float
    stop: bool = False
    peak_memory: int = 0
    memory: list[int] = field(default_factory=list)


def reduce_status(local: StepStatus, mesh: Mesh) -> StepStatus:
    """The sum of the losses of all samples, equal on every rank; every rank calls it."""
    vector = torch.zeros(STATUS_FIELDS + mesh.world.size, dtype=torch.float64)
    vector[0] = local.loss if mesh.reports_loss else 0.0
    vector[1] = float(local.stop)
    vector[STATUS_FIELDS + mesh.rank] = float(local.peak_memory)
    loss, stop, *memory = mesh.world.all_reduce(vector.to(mesh.device)).tolist()
    return StepStatus(loss, stop > 0, local.peak_memory, [int(count) for count in memory])
