"""Every estimate of one job, as one frozen value: what it sends, holds and takes.

Each is computed when it is first used: a batch of jobs that asks for times only counts no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpctl.core.units import seconds_text
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.advice import next_measurement
from mpctl.plan.estimate.communication import MessageCount
from mpctl.plan.estimate.flops import causal_model_flops
from mpctl.plan.estimate.host_memory import HostMemory, host_bytes, host_memory
from mpctl.plan.estimate.layer_messages import BlockTraffic, block_traffic
from mpctl.plan.estimate.memory import StageMemory, fit_text, fullest_stage, layout_memory
from mpctl.plan.estimate.messages import step_messages, validation_messages
from mpctl.plan.estimate.routing import balanced_layout, expert_load, loaded_layout
from mpctl.plan.estimate.states import checkpoint_bytes, snapshot_bytes
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.estimate.time import find_step_time


class AtLoad(NamedTuple):
    """Figures of a job with experts whose fullest rank has `load` times the mean of their rows: bytes of
    the fullest device, whether they fit, and seconds of a step; None where there are none."""

    load: float
    device_bytes: int
    fits: bool | None
    step_seconds: float | None


@dataclass(frozen=True, repr=False)
class Estimate:
    """The costs of a step of the job under its layout."""

    layout: JobLayout

    def __repr__(self) -> str:
        seconds = self.step_seconds
        step = "no step time" if seconds is None else f"{seconds_text(seconds)} a step"
        rate = "" if self.mfu is None else f", MFU {self.mfu:.0%}"
        return f"Estimate({step}{rate}, {self.verdict})"

    @cached_property
    def blocks(self) -> tuple[BlockTraffic, ...]:
        """Collectives over tp of the last block of each layer stack."""
        table = self.layout.table
        return tuple(
            block_traffic(self.layout, stack, flow.last)
            for stack, flow in zip(table.stacks, table.flows, strict=True)
            if stack.layers
        )

    @cached_property
    def messages(self) -> tuple[tuple[MessageCount, ...], ...]:
        """Messages of one step, of one rank of each stage."""
        return tuple(step_messages(self.layout))

    def validation(self, stage: int, replica: int, samples: Sequence[int]) -> tuple[MessageCount, ...]:
        """Messages of one validation, of one rank of a stage in a data-parallel replica.

        samples: validation samples of each corpus.
        """
        return validation_messages(self.layout, stage=stage, replica=replica, samples=samples)

    @property
    def parameters(self) -> int:
        """Parameters of the model, each counted once, padding of the vocabulary included."""
        return self.layout.table.numel

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of a layer with experts, those of the ones that it is
        sent to. Equal to `parameters` for a dense model."""
        return self.layout.table.active_numel(self.layout.model.experts_per_token)

    @cached_property
    def balanced(self) -> Estimate:
        """The same job with balanced routing of its experts; itself without experts."""
        layout = balanced_layout(self.layout)
        return self if layout is self.layout else Estimate(layout)

    @cached_property
    def loaded(self) -> Estimate:
        """The same job at the load that its memory has to hold (routing.py); itself without experts."""
        layout = loaded_layout(self.layout)
        return self if layout is self.layout else Estimate(layout)

    @property
    def memory(self) -> tuple[StageMemory, ...]:
        """Memory of one rank of each stage, which has to fit: at the load of experts that is planned for."""
        return self.loaded.expected_memory

    @cached_property
    def expected_memory(self) -> tuple[StageMemory, ...]:
        """The same at the load of experts that the job states, else at balanced routing: what a run's
        measured memory is compared with."""
        return tuple(layout_memory(self.layout))

    def at_loads(self) -> dict[str, AtLoad]:
        """Figures of `balanced` and `loaded` by these names; none without experts."""
        if self.layout.model.experts is None:
            return {}
        return {"balanced": self.balanced._at_load(), "loaded": self.loaded._at_load()}

    def _at_load(self) -> AtLoad:
        size = fullest_stage(self.expected_memory).device_bytes
        fits = self.layout.job.cluster.fits(size)
        return AtLoad(expert_load(self.layout).load, size, fits, self.step_seconds)

    @property
    def fullest_stage(self) -> StageMemory:
        """The stage whose ranks need most memory on their device."""
        return fullest_stage(self.memory)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors of one checkpoint, without the files' headers."""
        return checkpoint_bytes(self.layout)

    @cached_property
    def snapshot_bytes(self) -> int:
        """Bytes of host memory that a rank keeps for the copies that checkpoints are written from;
        0 where training waits for them."""
        return snapshot_bytes(self.layout)

    @cached_property
    def host_memory(self) -> HostMemory:
        """Host memory of a rank and of the ranks of a node."""
        return host_memory(self.layout)

    def host_bytes(self, ranks: int) -> int:
        """Bytes of host memory that so many ranks of one node need at most."""
        return host_bytes(self.layout, ranks)

    @cached_property
    def time(self) -> StepTime | str:
        """The time of a step, or in words what is missing to state one."""
        return find_step_time(self.layout)

    @cached_property
    def measure_next(self) -> str | None:
        """The measurement that would narrow the band of the step time most, in words; None if the system
        was measured."""
        return next_measurement(self.layout)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step; None where no time can be stated."""
        return self.time.total if isinstance(self.time, StepTime) else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that all ranks together train on in a second; None where no time can be stated."""
        seconds = self.step_seconds
        return None if seconds is None else self.layout.tokens_per_step / seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization: model FLOP/s, attention counted in full, over the devices' peak; None
        where no time can be stated."""
        return self.time.mfu if isinstance(self.time, StepTime) else None

    @cached_property
    def causal_mfu(self) -> float | None:
        """MFU where causal attention counts for the pairs alone that its mask leaves."""
        time = self.time
        return causal_model_flops(self.layout) / time.total / time.peak if isinstance(time, StepTime) else None

    @property
    def hfu(self) -> float | None:
        """Hardware FLOP utilization: mfu, with recomputation counted."""
        return self.time.hfu if isinstance(self.time, StepTime) else None

    @property
    def device_bytes(self) -> int:
        """Bytes that the fullest rank needs on its device."""
        return self.fullest_stage.device_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank fits its device and leaves the headroom free; None without a
        device."""
        return self.layout.job.cluster.fits(self.device_bytes)

    @property
    def verdict(self) -> str:
        """The same in words, with what is left or lacking."""
        job = self.layout.job
        who = "a rank" if job.parallel.pp == 1 else f"stage {self.fullest_stage.stage}"
        return fit_text(job.cluster, self.device_bytes, who)

    @property
    def contention(self) -> float:
        """Seconds of the step that ranks wait for a core that another uses; 0 where no time can be
        stated."""
        return self.time.contention if isinstance(self.time, StepTime) else 0.0
