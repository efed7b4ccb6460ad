"""The memory of one real step, to stand beside its plan: a ledger on a CPU, on CUDA the allocator.

The step is the first one that begins with the optimizer's moments, the second of a fresh run: every
later one holds the same. Watching changes no value; it costs the watched step some microseconds an
operation. Of a run of a single step that one is watched, and its moments come only at its end.

By hand, 10 bf16 parameters of one rank: 20 bytes, gradients 40, optimizer 120.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from mpctl.runtime.memory_tracker import Kind, MemoryTracker
from mpctl.runtime.optimizer import MOMENTS, Optimizer
from mpctl.runtime.pipeline import PipelineRunner
from mpctl.runtime.zero.gradients import GradientBuffer
from mpctl.spec.job import JobSpec

KEEPS = ("forward", "backward_input")


class WatchedTrainer(Protocol):
    """What of a rank's training is looked at: train.py's Trainer."""

    job: JobSpec
    model: nn.Module
    pipeline: PipelineRunner
    buffer: GradientBuffer
    optimizer: Optimizer
    step: int


def state_tensors(trainer: WatchedTrainer) -> dict[Kind, list[Tensor]]:
    """What lasts from step to step, by kind."""
    optimizer = trainer.optimizer
    moments = [state[name] for state in optimizer.adam.state.values() for name in MOMENTS]
    stores = (*optimizer.stores, *optimizer.frozen)
    held = {kind: [tensor for store in stores for tensor in store.held[kind]]
            for kind in ("optimizer", "parameters")}  # fmt: skip
    return {"optimizer": [*moments, *held["optimizer"]], "gradients": trainer.buffer.tensors,
            "parameters": [*trainer.model.parameters(), *held["parameters"]]}  # fmt: skip


def current_action(trainer: WatchedTrainer) -> tuple[object, bool]:
    """The pipeline's step, and whether a later one needs what it leaves."""
    at = trainer.pipeline.at
    return at, at is not None and at.action.kind in KEEPS


def storage_bytes(tensors: list[Tensor]) -> int:
    """Of the storages of these tensors, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


class MemoryWatch:
    """found: bytes by what the plan calls them, once the step is over; activations are known where
    a ledger counted."""

    def __init__(self, *, is_on: bool, device: torch.device) -> None:
        self.is_on, self.device = is_on, device
        self.found: dict[str, int | None] = {}

    @contextmanager
    def step(self, trainer: WatchedTrainer) -> Iterator[None]:
        """Around a step's gradients and update."""
        is_last = trainer.step + 1 == trainer.job.training.steps
        if not self.is_on or self.found or not (trainer.optimizer.adam.state or is_last):
            yield
        elif self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            self._note(trainer, torch.cuda.max_memory_allocated(self.device), None)
        else:
            ledger = MemoryTracker(self.device, own_only=True)
            for kind, tensors in state_tensors(trainer).items():
                ledger.know(kind, tensors)
            ledger.doing = lambda: current_action(trainer)
            ledger.restart()
            with ledger:
                yield
            self._note(trainer, ledger.peak, ledger.kept)

    def _note(self, trainer: WatchedTrainer, peak: int, activations: int | None) -> None:
        if not trainer.optimizer.adam.state:  # fp16 overflowed, or nothing is trained here
            return
        self.found = {"activations": activations, "peak": peak}
        self.found |= {
            kind: storage_bytes(tensors) for kind, tensors in state_tensors(trainer).items()
        }
