"""Figures over many steps in a rank's records and its report (RUN/ranks/rank-N.json): time in
collectives, FLOP utilization and device memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.flops import Utilization, run_utilization
from mpctl.records.rundir.rank_files import RankReport, StepRecord
from mpctl.records.rundir.summary import WARM_UP_STEPS, medians_by_axis
from mpctl.train.kernels.attention import AttentionVariant, slopes
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.counter_rng import DropoutMask
from mpctl.train.runtime.device import device_name
from mpctl.train.runtime.optimizer import TORCH_DTYPES
from mpctl.train.runtime.train import Trainer

REPORTED_STEPS = 1000  # the report covers the last steps of an attempt


@dataclass
class CommunicationSeconds:
    """Time of a rank in collectives in each of its last REPORTED_STEPS steps.

    steps: the step's duration, and by axis the seconds in collectives; num_seen: steps added.
    """

    steps: deque[tuple[float, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=REPORTED_STEPS))
    num_seen: int = 0

    def add(self, record: StepRecord) -> None:
        """Add a step; the first WARM_UP_STEPS count only until there are later ones."""
        if self.num_seen == WARM_UP_STEPS:
            self.steps.clear()
        self.num_seen += 1
        self.steps.append((record["step_seconds"], record.get("communication_seconds", {})))

    def report(self, report: RankReport) -> None:
        """Add the medians to a rank's report; nothing where there was no step."""
        if not self.steps:
            return
        by_axis = medians_by_axis([seconds for _, seconds in self.steps])
        report["communication_seconds"] = by_axis or {}
        report["communication_share"] = median(sum(seconds.values()) / duration for duration, seconds in self.steps)


@dataclass(frozen=True)
class DeviceFigures:
    """name: the GPU's name as torch reports it, None on a CPU; reserved_memory: returns the peak
    bytes that the allocator has reserved on it. attention: what computes attentions, in words."""

    name: str | None
    utilization: Utilization
    reserved_memory: Callable[[], int | None]
    attention: list[str]

    @classmethod
    def of(cls, trainer: Trainer) -> DeviceFigures:
        """The figures of the device that a trainer runs on."""
        name = device_name(trainer.mesh.device)
        used = run_utilization(trainer.partition.layout, name)
        environment, layout = trainer.environment, trainer.partition.layout
        attention = attention_kernels(layout, environment.kernels, trainer.mesh.device)
        return cls(name, used, environment.reserved_memory, attention)

    def add(self, record: StepRecord) -> None:
        """Add the step's figures of the device to its record."""
        seconds, used = record["step_seconds"], self.utilization
        mfu, hfu = used.mfu(seconds), used.hfu(seconds)
        if mfu is not None and hfu is not None:
            record["mfu"], record["hfu"] = mfu, hfu
        if (reserved := self.reserved_memory()) is not None:
            record["reserved_memory_bytes"] = reserved

    def report(self, report: RankReport) -> None:
        """Add to a rank's report."""
        report["device"], report["reserved_memory_bytes"] = self.name, self.reserved_memory()
        report["attention"] = self.attention


ASKED_ROWS = 128  # queries and keys of the attentions that kernels are asked about


def attention_kernels(layout: JobLayout, kernels: KernelBackend, device: torch.device) -> list[str]:
    """Name the kernels that compute a job's attentions on a device, each once, as chosen for one
    sample of this rank's heads and ASKED_ROWS positions."""
    model, training = layout.model, layout.job.training
    heads, n = model.heads // layout.grid.feature_parts, ASKED_ROWS
    dtype = TORCH_DTYPES[training.dtype]
    query = torch.empty((1, heads, n, model.qk_size), dtype=dtype, device=device)
    held = max(1, model.kv_heads // layout.grid.feature_parts)
    key = torch.empty((1, held, n, model.qk_size), dtype=dtype, device=device)
    value = torch.empty((1, held, n, model.v_size), dtype=dtype, device=device)
    samples, dropout = torch.zeros(1, dtype=torch.int64, device=device), None
    if training.attention_dropout:
        places = range(n), range(n), range(heads)
        dropout = DropoutMask(0, training.attention_dropout, samples, *places)
    stacks = layout.table.stacks
    parts = (part for stack in stacks for part in (*stack.kinds, stack.entry, stack.exit) if part)
    names = []
    for core in (core for part in parts for core in part.cores):
        pairs = torch.zeros((1, 1, n, n), dtype=dtype, device=device)
        variant = AttentionVariant(
            range(n),
            core.is_causal,
            model.attention_scale,
            mask=pairs == 0 if core.has_sample_mask else None,
            bias=pairs if core.has_bias else None,
            window=core.window or None,
            slopes=slopes(heads, device=device) if core.has_slopes else None,
            dropout=dropout,
        )
        names.append(kernels.attention_name(query, key, value, variant))
    return list(dict.fromkeys(names))
