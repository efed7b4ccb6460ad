"""What is known of a step: its record (rundir/rank_files.py), and what all ranks tell each other in
one small all-reduce over the world.

That is a vector of float64: the loss (the sum over its samples from each rank of a last stage that
`reports_loss`: tp rank 0, or of a grid one rank for each of its parts of the samples), whether a
stop was requested, and every rank's peak memory in its own slot. Rank 1 of 2, loss 0.5, no stop, 7
bytes: [0.5, 0, 0, 7]. It is how a stop reaches all ranks at the same step.

The vector is made on the device, whose loss the host has not read, and reading it is the one moment
of a step in which the host waits for its device: what else the host needs of the step, the norm of
its gradient, comes along.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpctl.layout.job_layout import STATUS_FIELDS
from mpctl.rundir.rank_files import StepRecord, Traffic
from mpctl.runtime.mesh import Mesh
from mpctl.transport.timing import Collective


class StepClock:
    """Measures one step, from when it is made: seconds of the clock, and of this process."""

    def __init__(self) -> None:
        self.began, self.cpu_began = time.perf_counter(), time.process_time()
        self.seconds, self.cpu_seconds = 0.0, 0.0

    def stop(self) -> None:
        """The step is over."""
        self.seconds = time.perf_counter() - self.began
        self.cpu_seconds = time.process_time() - self.cpu_began

    def record(self, step: int, loss: float, tokens: int) -> StepRecord:
        """The record of step `step`, from 1, of so many tokens."""
        return {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "tokens": step * tokens,
            "step_seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "tokens_per_second": tokens / self.seconds,
        }


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
        messages (transport/messages.py)."""
        return {
            f"{axis} {kind}": {"count": self.counts[axis, kind], "bytes": total}
            for (axis, kind), total in sorted(self.bytes.items())
        }
