"""What all ranks tell each other once a step, in one small all-reduce over the world.

A vector of float64: the loss (each replica's share, told by tp rank 0 of its last stage, which
alone knows it), whether a stop was asked for, and every rank's peak memory in its own slot. It is
how a stop reaches all ranks at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mpctl.runtime.mesh import Mesh

STATUS_FIELDS = 2


@dataclass(frozen=True)
class StepStatus:
    """loss: this rank's share before `reduce_status`, the sum after it; memory: bytes by rank."""

    loss: float
    stop: bool = False
    peak_memory: int = 0
    memory: list[int] = field(default_factory=list)


def reduce_status(own: StepStatus, mesh: Mesh) -> StepStatus:
    """The sum over all replicas, equal on every rank."""
    vector = torch.zeros(STATUS_FIELDS + mesh.world.size, dtype=torch.float64)
    vector[0] = own.loss if mesh.tells_loss else 0.0
    vector[1] = float(own.stop)
    vector[STATUS_FIELDS + mesh.rank] = float(own.peak_memory)
    summed = mesh.world.all_reduce(vector.to(mesh.device)).tolist()
    return StepStatus(
        summed[0], summed[1] > 0, own.peak_memory, [int(b) for b in summed[STATUS_FIELDS:]]
    )
