"""The status that all ranks share once a step in one small all-reduce over the world, and the
traffic of a rank.

The status is a vector of float64: the loss (the sum over its samples, from each rank of a last
stage that `reports_loss`: tp rank 0, or on a grid one rank for each of its parts of the samples),
whether a stop was requested, in a training step the gradient norm, from rank 0 alone, and a slot
for each rank's peak memory. Rank 1 of 2, loss 0.5, no stop, 7 bytes: [0.5, 0, 0, 0, 7]; with
experts their loss and near ties come fourth (routing.py). So a stop reaches all ranks at the same
step.

Ranks sum the norm in several groups, and a library promises the same bits only within one: NCCL
sums in an order that depends on where the members of a group are. Replicas that clip by factors an
ulp apart drift apart for good. So the update uses rank 0's norm, which this sum brings to all: the
others add 0 to it.

The vector is made on the device, since the host has not read the loss. Reading it is the only point
of a step at which the host waits for its device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpctl.model.layout.job_layout import NORM_FIELDS, STATUS_FIELDS
from mpctl.records.rundir.rank_files import Traffic
from mpctl.train.runtime.mesh import Mesh
from mpctl.train.transport.timing import Collective

ReadFigures = Callable[[Tensor], list[float]]
"""Copies the numbers of a device tensor [n] to the host, which waits for the copy."""


@dataclass(frozen=True)
class StepStatus:
    """The status of all ranks, equal on each of them. loss: the sum over all samples; stop: whether
    any rank was asked to stop; memory: peak bytes of every rank; norm: rank 0's; sums: of the
    shares that `share_status` was given; known: what it was given."""

    loss: float
    stop: bool
    memory: list[int]
    norm: float
    sums: Sequence[float] = ()
    known: Sequence[float] = ()


@dataclass(frozen=True)
class SharedStatus:
    """The status on the device. vector: the sum over all ranks; known: as `share_status` was given;
    shares: how many there are."""

    vector: Tensor
    known: Sequence[Tensor]
    shares: int

    @property
    def norm(self) -> Tensor:
        """The gradient norm, a float64 scalar with the same bits on all ranks."""
        return self.vector[STATUS_FIELDS]

    def read(self, read: ReadFigures = Tensor.tolist) -> StepStatus:
        """The status on the host, which waits for the device."""
        numbers = read(torch.cat([self.vector, *(one.view(1) for one in self.known)]))
        ranks = STATUS_FIELDS + NORM_FIELDS + self.shares
        loss, stop, norm, *sums = numbers[:ranks]
        memory = [int(count) for count in numbers[ranks : len(self.vector)]]
        return StepStatus(loss, stop > 0, memory, norm, sums, numbers[len(self.vector) :])


def share_status(
    loss: Tensor,
    norm: Tensor,
    mesh: Mesh,
    *,
    stop: bool = False,
    peak_memory: int = 0,
    shares: Sequence[Tensor] = (),
    known: Sequence[Tensor] = (),
) -> SharedStatus:
    """Share the status of a training step; every rank calls it. loss: this rank's share; norm: the
    gradient's, a float64 scalar; stop: whether this rank was asked to stop; shares: more float64
    scalars, which are summed; known: more that are equal on all ranks."""
    is_first = mesh.rank == 0
    fields = [norm if is_first else torch.zeros_like(norm), *shares]
    ranks = STATUS_FIELDS + len(fields)
    vector = torch.zeros(ranks + mesh.world.size, dtype=torch.float64, device=mesh.device)
    if mesh.reports_loss:
        vector[0].add_(loss)
    vector[1].fill_(float(stop))
    for place, share in enumerate(fields, start=STATUS_FIELDS):
        vector[place].copy_(share)
    vector[ranks + mesh.rank].fill_(float(peak_memory))
    return SharedStatus(mesh.world.all_reduce(vector), known, len(shares))


def total_over_ranks(loss: Tensor | float, mesh: Mesh) -> float:
    """The sum of a number over the ranks that report a loss, in a status without more; every rank
    calls it."""
    vector = torch.zeros(STATUS_FIELDS + mesh.world.size, dtype=torch.float64, device=mesh.device)
    if mesh.reports_loss:
        vector[0].add_(loss)
    return float(mesh.world.all_reduce(vector)[0])


@dataclass
class TrafficCounter:
    """Collectives since the last `clear`, by axis and kind."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def record(self, collective: Collective) -> None:
        """Count one collective."""
        key = (collective.axis, collective.kind)
        self.counts[key] += 1
        self.bytes[key] += collective.bytes

    def clear(self) -> None:
        """Count from 0 again."""
        self.counts.clear()
        self.bytes.clear()

    def snapshot(self) -> Traffic:
        """By axis and kind, `{"tp all_reduce": {"count": 12, "bytes": 3145728}}`; bytes of full
        messages (train/transport/timing.py)."""
        return {
            f"{axis} {kind}": {"count": self.counts[axis, kind], "bytes": total}
            for (axis, kind), total in sorted(self.bytes.items())
        }
