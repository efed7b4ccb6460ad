"""The training loop: micro batches in, one update a step, one record a step.

The loss of a step is the mean over the samples of the global batch. Each micro batch's summed loss
is divided by their number before backward, so gradients only ever need to be summed, over micro
batches and replicas, and every layout computes the same number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mpctl.families.batch import Objective
from mpctl.kernels.parameters import shard_of
from mpctl.runtime.batches import DatasetBatches
from mpctl.runtime.checkpointing import loader as checkpoint
from mpctl.runtime.checkpointing.model_weights import padding_rows, read_values
from mpctl.runtime.checkpointing.saver import Saver
from mpctl.runtime.loss_scale import LossScale
from mpctl.runtime.lr_schedule import learning_rate
from mpctl.runtime.memory_watch import MemoryWatch
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.nonfinite import GradientInspector, locate_nonfinite
from mpctl.runtime.optimizer import Optimizer
from mpctl.runtime.partition import PipelinePartition
from mpctl.runtime.pipeline import PipelineRunner
from mpctl.runtime.status import StepStatus, reduce_status
from mpctl.runtime.traffic import TrafficCounter
from mpctl.runtime.zero.gradients import GradientBuffer, clip_factor
from mpctl.runtime.zero.overlap import GradientOverlap
from mpctl.spec.job import JobSpec
from mpctl.weights.extend import fill_tables
from mpctl.weights.origin import open_origin


@dataclass
class Trainer:
    """One rank's training state; `stop_asked` is polled once a step. phase: of the run; scale: of
    the loss, in fp16; last_validation: `samples` of each corpus in the last validation, and the
    `traffic` of all of them."""

    job: JobSpec
    mesh: Mesh
    cut: PipelinePartition
    pipeline: PipelineRunner
    model: nn.Module
    buffer: GradientBuffer
    overlap: GradientOverlap
    scale: LossScale | None
    optimizer: Optimizer
    batches: DatasetBatches
    saver: Saver
    stop_asked: Callable[[], bool]
    peak_memory: Callable[[], int]
    traffic: TrafficCounter
    watch: MemoryWatch
    step: int = 0
    phase: str = "starting"
    saved: set[int] = field(default_factory=set)
    step_traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    last_validation: dict[str, Any] | None = None

    @property
    def doing(self) -> str:
        return self.phase + self.pipeline.where

    def run(self) -> Iterator[dict[str, Any]]:
        """Train to the last step, or to the first step after a stop was asked for.

        Yields one record a step; saves at intervals, at the end and on a stop. A step that is saved
        and validated is saved first, so that a validation that fails loses no training.
        """
        training, stopping = self.job.training, False
        before = self.validate() if training.eval_interval and not self.step else {}
        while self.step < training.steps and not stopping:
            record, stopping = self.one_step()
            if self.step == 1 and before:
                record |= {f"initial_{name}": value for name, value in before.items()}
            saves = self._saves(stopping)
            if self.step == training.steps or _due(training.eval_interval, self.step):
                if saves:
                    self.save()
                try:
                    record |= self.validate()
                except Exception:
                    yield record
                    raise
            yield record  # before a save: what a checkpoint follows is on record
            if saves:
                self.save()

    def _saves(self, stopping: bool) -> bool:
        """Whether the step just trained is to be saved."""
        training = self.job.training
        at_end = training.checkpoint_at_end and self.step == training.steps
        return stopping or at_end or _due(training.checkpoint_interval, self.step)

    def one_step(self) -> tuple[dict[str, Any], bool]:
        """One update; the record of it and whether any rank was asked to stop."""
        self.phase = f"step {self.step + 1}"
        self.traffic.clear()
        began, cpu_began = time.perf_counter(), time.process_time()
        with self.watch.step(self):
            loss = self._find_gradients()
            norm, update = self._update(loss)
        status = reduce_status(StepStatus(loss, self.stop_asked(), self.peak_memory()), self.mesh)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        self.step += 1
        self.step_traffic = self.traffic.snapshot()
        if not math.isfinite(status.loss):
            what = f"the loss of step {self.step} is {status.loss}"
            raise locate_nonfinite(what, self.mesh, GradientInspector(self.names).evidence(loss))
        tokens = self._tokens_per_step()
        return {
            "step": self.step,
            "loss": status.loss,
            "tokens": self.step * tokens,
            "step_seconds": seconds,
            "cpu_seconds": cpu,
            "tokens_per_second": tokens / seconds,
            "grad_norm": norm,
            **update,
            "memory_bytes": status.memory,
            "predicted_step_seconds": self.job.launch.predicted_step_seconds,
        }, status.stop

    def _find_gradients(self) -> float:
        """Of one step, summed over all that have a part of them; this rank's share of the loss."""
        self.buffer.zero()
        self.overlap.restart()
        scale = self.scale.value if self.scale else 1.0
        loss = self.pipeline.train(self.batches.step(self.step), step=self.step, scale=scale)
        self.overlap.finish()
        self.buffer.sum_parts()
        return loss

    def _update(self, loss: float) -> tuple[float | None, dict[str, Any]]:
        """The gradient's norm, the same number on every rank, and what followed from it: an update,
        or none where fp16 overflowed; elsewhere a norm that is no number ends the run."""
        used = self.scale.value if self.scale else 1.0
        norm, said = self.buffer.norm() / used, {"loss_scale": used} if self.scale else {}
        if math.isfinite(norm):
            self.buffer.scale(clip_factor(norm, self.job.training.clip_norm) / used)
            rate = self.optimizer.step(self.step)
            if self.scale:
                self.scale.went_well()
            return norm, {"learning_rate": rate, **said}
        if self.scale is None:
            self._blame(f"the gradient norm of step {self.step + 1} is {norm}", loss)
        assert self.scale is not None
        self.scale.overflowed()
        self.optimizer.publish()  # what is there: a step sends the same whatever comes of it
        rate = learning_rate(self.job.training, self.step)
        return None, {"learning_rate": rate, **said, "skipped": True}

    def _blame(self, what: str, loss: float) -> NoReturn:
        """Compute the step once more, each rank looking at its own gradients, and end the run."""
        inspector = GradientInspector(self.names)
        self.overlap.before_sum = inspector.look
        self._find_gradients()
        raise locate_nonfinite(what, self.mesh, inspector.evidence(loss))

    def _tokens_per_step(self) -> int:
        assert self.job.model is not None
        return (self.job.training.global_batch_size or 1) * self.job.model.tokens_per_sample

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Mean loss over the validation samples, without dropout; of every corpus that has some."""
        self.phase = f"validation after step {self.step}"
        if self.batches.validation is None:
            return {}
        self.traffic.clear()
        corpora = (self.batches.validation, *self.batches.validations.values())
        found: dict[str, Any] = {"validation_loss": self._mean_loss(self.batches.validation)}
        others = {name: self._mean_loss(held) for name, held in self.batches.validations.items()}
        self.last_validation = {
            "samples": [self.batches.eval_samples(held) for held in corpora],
            "traffic": self.traffic.snapshot(),
        }
        return found | ({"validation_losses": others} if others else {})

    def _mean_loss(self, held: Objective) -> float:
        """Over its validation samples, each counted once whatever the number of replicas."""
        batches, counted = self.batches.evaluation(held)
        total = self.pipeline.evaluate(batches, counted=counted)
        return reduce_status(StepStatus(total / self.batches.eval_samples(held)), self.mesh).loss

    @property
    def names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self.model.named_parameters()}

    def save(self) -> None:
        if self.step in self.saved:
            return
        own = {p: name for p, name in self.names.items() if self.cut.owns(name)}
        self.saver.save(self.step, own, self.optimizer, scale=self.scale, say=self._say)
        self.saved.add(self.step)

    def _say(self, phase: str) -> None:
        """Let whoever watches this rank know what it is doing."""
        self.phase = phase
        self.pipeline.on_move()

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint, whatever layout wrote it."""
        self.phase = f"loading {folder.name}"
        saved = checkpoint.load(
            folder,
            self.names,
            self.optimizer,
            model=self.cut.names,
            may_lack=padding_rows(self.cut.model),
        )
        self.step = saved.step
        if self.scale:
            self.scale.load(saved.loss_scale)
        self.saved.add(self.step)

    def start_from(self, path: Path) -> None:
        """Take the weights of another model of this shape, into float32 masters where there are
        any; step, moments and data order are those of a fresh run."""
        self.phase = f"reading initial weights from {path}"
        values = {p: self.optimizer.value_of(p).detach() for p in self.names}
        targets = {name: (shard_of(p), values[p]) for p, name in self.names.items()}
        origin, model = open_origin(path), self.job.model
        assert model is not None
        extension, reserved = self.batches.prepared.extension, self.batches.reserved
        targets = fill_tables(origin, model, targets, extension, reserved=reserved)
        read_values(origin, targets, model)
        for parameter, value in values.items():
            self.optimizer.keep(parameter, value)
        self.optimizer.publish()


def _due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
