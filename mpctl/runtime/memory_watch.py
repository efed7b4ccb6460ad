"""The memory of one real step, to stand beside its plan: a MemoryTracker on a CPU, on CUDA the
allocator.

The step is the first one that begins with the optimizer's moments, the second of a fresh run: every
later one takes the same. Watching changes no value; it costs the watched step some microseconds an
operation. Of a run of a single step that one is watched, and its moments come only at its end.

By hand, 10 bf16 parameters of one rank: 20 bytes, gradients 40, optimizer 120.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from mpctl.runtime.adamw import MOMENTS
from mpctl.runtime.environment import RuntimeEnvironment
from mpctl.runtime.memory_tracker import Kind, MemoryTracker
from mpctl.runtime.optimizer import Optimizer
from mpctl.runtime.pipeline import PipelineRunner
from mpctl.runtime.zero.gradients import GradientBuffer
from mpctl.spec.job import JobSpec

SAVING_KINDS = ("forward", "backward_input")  # actions that leave tensors for a later one


class WatchedTrainer(Protocol):
    """What of a rank's training is looked at: train.py's Trainer."""

    step: int

    @property
    def job(self) -> JobSpec:
        """The job that is run."""

    @property
    def model(self) -> nn.Module:
        """All chunks of this rank's stage."""

    @property
    def pipeline(self) -> PipelineRunner:
        """What runs the stage."""

    @property
    def buffer(self) -> GradientBuffer:
        """Every gradient of this rank."""

    @property
    def optimizer(self) -> Optimizer:
        """What steps the parameters."""


def state_tensors(trainer: WatchedTrainer) -> dict[Kind, list[Tensor]]:
    """What lasts from step to step, by kind."""
    optimizer = trainer.optimizer
    moments = [state[name] for state in optimizer.adam.state.values() for name in MOMENTS]
    stores = (*optimizer.stores, *optimizer.frozen)
    masters = [tensor for store in stores for tensor in store.master_tensors]
    flat = [tensor for store in stores for tensor in store.parameter_tensors]
    return {
        "optimizer": [*moments, *masters],
        "gradients": trainer.buffer.tensors,
        "parameters": [*trainer.model.parameters(), *flat],
    }


def current_action(trainer: WatchedTrainer) -> tuple[object, bool]:
    """The pipeline's step, and whether a later one needs what it leaves."""
    current = trainer.pipeline.current
    return current, current is not None and current.action.kind in SAVING_KINDS


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages of these tensors, each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


class MemoryWatch:
    """Measures one step. measured: bytes by what the plan calls them, once that step is over; None
    for activations where no MemoryTracker counted. before_reset: is called before the allocator's
    own peak is set back, to keep that of the steps before."""

    def __init__(
        self, *, is_on: bool, device: torch.device, before_reset: Callable[[], object]
    ) -> None:
        self.is_on, self.device, self.before_reset = is_on, device, before_reset
        self.measured: dict[str, int | None] = {}

    @classmethod
    def of(cls, job: JobSpec, environment: RuntimeEnvironment) -> MemoryWatch:
        """The watch that `launch.track_memory` asks for. On a CPU storages are counted operation by
        operation, which compiled layers do not show."""
        device = environment.device
        is_countable = not (job.launch.compile and device.type == "cpu")
        is_on = job.launch.track_memory and is_countable
        return cls(is_on=is_on, device=device, before_reset=environment.peak_memory)

    @contextmanager
    def step(self, trainer: WatchedTrainer) -> Iterator[None]:
        """To be entered around a step's gradients and update."""
        is_last = trainer.step + 1 == trainer.job.training.steps
        if not self.is_on or self.measured or not (trainer.optimizer.adam.state or is_last):
            yield
        elif self.device.type == "cuda":
            self.before_reset()
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            peak = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            self._note(trainer, {"activations": None, "peak": peak, "reserved": reserved})
        else:
            tracker = MemoryTracker(self.device, own_only=True)
            for kind, tensors in state_tensors(trainer).items():
                tracker.add(kind, tensors)
            tracker.current_action = lambda: current_action(trainer)
            tracker.restart()
            with tracker:
                yield
            found = {"activations": tracker.peak_activations, "peak": tracker.peak}
            self._note(trainer, found)

    def _note(self, trainer: WatchedTrainer, found: Mapping[str, int | None]) -> None:
        if not trainer.optimizer.adam.state:  # fp16 overflowed, or nothing is trained here
            return
        self.measured = {**found}
        for kind, tensors in state_tensors(trainer).items():
            self.measured[kind] = storage_bytes(tensors)
