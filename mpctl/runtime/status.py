"""What all ranks tell each other once a step, in one small all-reduce over the world.

A vector of float64: the loss (the sum over its samples from each rank of a last stage that
`reports_loss`: tp rank 0, or of a grid one rank for each of its parts of the samples), whether a
stop was requested, and every rank's peak memory in its own slot. It is how a stop reaches all ranks
at the same step.

The vector is made on the device, whose loss the host has not read, and reading it is the one moment
of a step in which the host waits for its device: what else the host needs of the step, the norm of
its gradient, comes along.

By hand, rank 1 of 2, loss 0.5, no stop, 7 bytes: [0.5, 0, 0, 7].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mpctl.layout.limits import STATUS_FIELDS
from mpctl.runtime.mesh import Mesh

ReadFigures = Callable[[Tensor], list[float]]
"""Gives the host the numbers of a tensor [n] of the device, in one copy that it waits for."""


@dataclass(frozen=True)
class OwnStatus:
    """One rank's part of the status. loss: its share, a number or a scalar on the device;
    peak_memory: bytes."""

    loss: Tensor | float
    stop: bool = False
    peak_memory: int = 0


@dataclass(frozen=True)
class StepStatus:
    """The status of all ranks, equal on every one. loss: the sum over all samples; stop: whether
    any rank is to stop; memory: peak bytes of every rank; norm: what `reduce_status` was given."""

    loss: float
    stop: bool
    memory: list[int]
    norm: float


def read_figures(figures: Tensor) -> list[float]:
    """See ReadFigures."""
    numbers: list[float] = figures.tolist()
    return numbers


def reduce_status(
    own: OwnStatus, mesh: Mesh, *, norm: Tensor | None = None, read: ReadFigures = read_figures
) -> StepStatus:
    """The status of all ranks; every rank calls it. norm: a float64 scalar, equal on all ranks."""
    vector = torch.zeros(STATUS_FIELDS + mesh.world.size, dtype=torch.float64, device=mesh.device)
    if mesh.reports_loss:
        vector[0].add_(own.loss)
    vector[1].fill_(float(own.stop))
    vector[STATUS_FIELDS + mesh.rank].fill_(float(own.peak_memory))
    known = torch.zeros_like(vector[0]) if norm is None else norm
    figures = torch.cat([mesh.world.all_reduce(vector), known.view(1)])
    loss, stop, *memory, of_gradient = read(figures)
    return StepStatus(loss, stop > 0, [int(count) for count in memory], of_gradient)
