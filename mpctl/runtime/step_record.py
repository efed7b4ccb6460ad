"""The status that all ranks share once a step in one small all-reduce over the world, and the
traffic of a rank.

The status is a vector of float64: the loss (the sum over its samples, from each rank of a last
stage that `reports_loss`: tp rank 0, or on a grid one rank for each of its parts of the samples),
whether a stop was requested, and a slot for each rank's peak memory. Rank 1 of 2, loss 0.5, no
stop, 7 bytes: [0.5, 0, 0, 7]; with experts their loss and near ties come third (routing.py). So a
stop reaches all ranks at the same step.

The vector is made on the device, since the host has not read the loss. Reading it is the only point
of a step at which the host waits for its device, so the gradient norm is read in the same copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpctl.layout.job_layout import STATUS_FIELDS
from mpctl.rundir.rank_files import Traffic
from mpctl.runtime.mesh import Mesh
from mpctl.transport.timing import Collective

ReadFigures = Callable[[Tensor], list[float]]
"""Copies the numbers of a device tensor [n] to the host, which waits for the copy."""


@dataclass(frozen=True)
class StepStatus:
    """The status of all ranks, equal on each of them. loss: the sum over all samples; stop: whether
    any rank was asked to stop; memory: peak bytes of every rank; norm, known: the arguments of
    `reduce_status`; sums: those of its shares."""

    loss: float
    stop: bool
    memory: list[int]
    norm: float
    sums: Sequence[float] = ()
    known: Sequence[float] = ()


def reduce_status(
    loss: Tensor | float,
    mesh: Mesh,
    *,
    stop: bool = False,
    peak_memory: int = 0,
    norm: Tensor | None = None,
    shares: Sequence[Tensor] = (),
    known: Sequence[Tensor] = (),
    read: ReadFigures = Tensor.tolist,
) -> StepStatus:
    """The status of all ranks; every rank calls it. loss: this rank's share; stop: whether it was
    asked to stop; norm: a float64 scalar, equal on all ranks; shares: more float64 scalars, which
    are summed; known: more that are equal on all ranks."""
    fields = STATUS_FIELDS + len(shares)
    vector = torch.zeros(fields + mesh.world.size, dtype=torch.float64, device=mesh.device)
    if mesh.reports_loss:
        vector[0].add_(loss)
    vector[1].fill_(float(stop))
    for place, share in enumerate(shares, start=STATUS_FIELDS):
        vector[place].copy_(share)
    vector[fields + mesh.rank].fill_(float(peak_memory))
    equal = [torch.zeros_like(vector[0]) if norm is None else norm, *known]
    figures = torch.cat([mesh.world.all_reduce(vector), *(one.view(1) for one in equal)])
    numbers = read(figures)
    total, stopping, *sums = numbers[:fields]
    memory = [int(count) for count in numbers[fields : len(vector)]]
    of_gradient, *others = numbers[len(vector) :]
    return StepStatus(total, stopping > 0, memory, of_gradient, sums, others)


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
        messages (transport/timing.py)."""
        return {
            f"{axis} {kind}": {"count": self.counts[axis, kind], "bytes": total}
            for (axis, kind), total in sorted(self.bytes.items())
        }
