"""The training loop: micro batches in, one update a step, one record a step.

The loss of a step is the mean over the samples of the global batch. Each micro batch's summed loss
is divided by their number before backward, so gradients only ever need to be summed, over micro
batches and replicas, and every layout computes the same number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from mpctl.families.batch import Objective
from mpctl.kernels.fp8_scales import Fp8Scales
from mpctl.rundir.rank_files import StepRecord, Traffic, ValidationReport
from mpctl.runtime.batches import Batches
from mpctl.runtime.checkpointing import loader
from mpctl.runtime.checkpointing.saver import Saver
from mpctl.runtime.environment import RuntimeEnvironment
from mpctl.runtime.loss_scale import LossScale
from mpctl.runtime.lr_schedule import learning_rate
from mpctl.runtime.memory_watch import MemoryWatch
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.nonfinite import GradientInspector, locate_nonfinite
from mpctl.runtime.optimizer import Optimizer
from mpctl.runtime.partition import PipelinePartition
from mpctl.runtime.pipeline import PipelineRunner
from mpctl.runtime.profile import StepProfile
from mpctl.runtime.status import StepStatus, reduce_status
from mpctl.runtime.step_guard import Judgement, StepGuard, StepRefused
from mpctl.runtime.step_record import UpdateResult, ValidationLosses
from mpctl.runtime.zero.gradients import GradientBuffer, clip_factor
from mpctl.runtime.zero.overlap import GradientOverlap
from mpctl.spec.job import JobSpec
from mpctl.weights.saved_tensors import padding_rows


@dataclass
class Trainer:
    """One rank's training.

    step: updates so far. phase: what the run is doing, in words. step_traffic: collectives of the
    last step. loss_scale: None unless in fp16. fp8: the table of its scales.
    """

    mesh: Mesh
    pipeline: PipelineRunner
    gradients: GradientOverlap
    optimizer: Optimizer
    batches: Batches
    saver: Saver
    environment: RuntimeEnvironment
    fp8: Fp8Scales
    step: int = 0
    phase: str = "starting"
    step_traffic: Traffic = field(default_factory=dict)
    last_validation: ValidationReport | None = None

    def __post_init__(self) -> None:
        self.saver.on_change = lambda: self.pipeline.on_move()
        self.loss_scale = LossScale.of(self.job.training)
        self.memory_watch = MemoryWatch.of(self.job, self.mesh.device)
        self.guard = StepGuard(self.job.training)

    @property
    def partition(self) -> PipelinePartition:
        """The job's layout as this rank's stage sees it."""
        return self.pipeline.partition

    @property
    def job(self) -> JobSpec:
        """The job that is run."""
        return self.partition.job

    @property
    def model(self) -> nn.Module:
        """All chunks of this rank's stage."""
        return self.pipeline.model

    @property
    def buffer(self) -> GradientBuffer:
        """Every gradient of this rank."""
        return self.gradients.buffer

    @property
    def profile(self) -> StepProfile:
        """Records what is done when, in the steps that `launch.profile` names."""
        return self.environment.profile

    @property
    def names(self) -> dict[Tensor, str]:
        """The global name of each parameter of this rank."""
        return {parameter: name for name, parameter in self.model.named_parameters()}

    @property
    def activity(self) -> str:
        """What this rank is doing: `step 3, stage 1, forward of micro batch 2`, and what a thread
        saves meanwhile."""
        return self.saver.activity(self.phase + self.pipeline.where)

    def run(self) -> Iterator[StepRecord]:
        """Train to the last step, or to the first step after a stop was requested.

        Yields one record a step; saves at intervals, at the end and on a stop. A step that is saved
        and validated is saved first, so that a validation that fails loses no training. Returns
        when the last save is published; raises SaveFailed where one failed.
        """
        training, stopping = self.job.training, False
        initial = self.validate() if training.eval_interval and not self.step else None
        while self.step < training.steps and not stopping:
            record, stopping = self.one_step()
            if self.step == 1 and initial:
                initial.add_initial(record)
            saves = self._saves(stopping)
            if self.step == training.steps or _is_due(training.eval_interval, self.step):
                if saves:
                    self.begin_save()
                try:
                    with self.profile.span("validation"):
                        losses = self.validate()
                except Exception:
                    yield record
                    raise
                if losses:
                    losses.add(record)
            self.saver.add_times(record)
            yield record  # before a save: every step of a checkpoint is on record
            if saves:
                self.begin_save()
        self.profile.finish()
        self.optimizer.settle()
        self.saver.finish()

    def _saves(self, stopping: bool) -> bool:
        """Whether the step just trained is to be saved."""
        saving = self.job.checkpoint
        at_end = saving.at_end and self.step == self.job.training.steps
        return stopping or at_end or _is_due(saving.interval, self.step)

    def one_step(self) -> tuple[StepRecord, bool]:
        """One update; its record, and whether any rank was asked to stop.

        Raises StepRefused where the step guard ends the run or wants a rollback: NotFinite, naming
        the rank it came from, where the loss or, outside of fp16, the gradient norm is not finite.
        """
        self.phase = f"step {self.step + 1}"
        self.profile.begin_step(self.step + 1)
        self.environment.count_anew()
        began, cpu_began = time.perf_counter(), time.process_time()
        with self.memory_watch.step(self):
            loss = self._compute_gradients()
            early = self._reduce_status(loss) if self.guard.needs_loss else None
            update = self._update(loss, early)
            self.fp8.end_step(self.mesh.world)
        status = early or self._reduce_status(loss)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        self.profile.end_step()
        if early is None:
            self._require_good(loss, status.loss)
        if not update.skipped:
            self.guard.made_update(status.loss)
        self.step += 1
        self.step_traffic = self.environment.traffic.snapshot()
        tokens = self.partition.layout.tokens_per_step
        record: StepRecord = {
            "step": self.step,
            "loss": status.loss if math.isfinite(status.loss) else None,
            "tokens": self.step * tokens,
            "step_seconds": seconds,
            "cpu_seconds": cpu,
            "tokens_per_second": tokens / seconds,
            "communication_seconds": self.environment.communication.snapshot(),
        }
        update.add(record)
        record["memory_bytes"] = status.memory
        record["predicted_step_seconds"] = self.job.launch.predicted_step_seconds
        return record, status.stop

    def _compute_gradients(self) -> float:
        """Gradients of one step, reduced over all ranks; returns this rank's share of the loss."""
        self.buffer.zero()
        self.gradients.restart()
        scale = self.loss_scale.value if self.loss_scale else 1.0
        batches = self.profile.each("data", self.batches.training_step(self.step))
        loss = self.pipeline.train(batches, step=self.step, scale=scale)
        with self.profile.span("gradients"):
            self.gradients.finish()
            self.buffer.sum_parts()
        return loss

    def _update(self, loss: float, status: StepStatus | None) -> UpdateResult:
        """Step the optimizer, or skip the step where fp16 overflowed or the guard says so.

        status: of the step, None where it is shared after the update. The gradient's norm is the
        same number on every rank, so that all decide alike.
        """
        scale = self.loss_scale
        used = scale.value if scale else 1.0
        with self.profile.span("norm"):
            norm = self.buffer.norm() / used
        shared = None if status is None else status.loss
        is_fp16 = scale is not None
        judgement = self.guard.judge(self.step + 1, shared, norm, may_overflow=is_fp16)
        if judgement.action in ("stop", "rollback"):
            raise self._refusal(judgement, loss, recompute=not judgement.is_spike)
        if math.isfinite(norm) and judgement.action == "update":
            self.buffer.scale(clip_factor(norm, self.job.training.clip_norm) / used)
            with self.profile.span("optimizer"):
                rate = self.optimizer.step(self.step)
            if scale:
                scale.went_well()
            return UpdateResult(norm, rate, used if scale else None)
        if scale and not math.isfinite(norm):
            scale.overflowed()
        self.optimizer.publish()  # unchanged values: a skipped step sends what every step sends
        rate = learning_rate(self.job.training, self.step)
        known = norm if math.isfinite(norm) else None
        return UpdateResult(known, rate, used if scale else None, True, judgement.reason)

    def _require_good(self, loss: float, shared: float) -> None:
        """Judge a step whose loss was shared after its update. Raises StepRefused."""
        judgement = self.guard.judge(self.step + 1, shared, 0.0, may_overflow=False)
        if judgement.action != "update":
            raise self._refusal(judgement, loss, recompute=False)

    def _refusal(self, judgement: Judgement, loss: float, *, recompute: bool) -> StepRefused:
        """The failure that ends the run on this rank; every rank calls it. recompute: compute the
        step once more, each rank looking at its own gradients, to find where it came from."""
        rollback = self.step + 1 if judgement.action == "rollback" else None
        if judgement.is_spike:
            return StepRefused(judgement.reason, is_echo=self.mesh.rank > 0, rollback=rollback)
        inspector = GradientInspector(self.names)
        if recompute:
            self.gradients.before_reduce = inspector.look
            self._compute_gradients()
        evidence = inspector.evidence(loss)
        return locate_nonfinite(judgement.reason, self.mesh, evidence, rollback=rollback)

    def _reduce_status(self, loss: float) -> StepStatus:
        environment = self.environment
        stop = environment.stop_requested() or self.saver.has_failed
        with self.profile.span("status"):
            return reduce_status(StepStatus(loss, stop, environment.peak_memory()), self.mesh)

    @torch.no_grad()
    def validate(self) -> ValidationLosses | None:
        """The mean loss over the validation samples of each corpus, without dropout; None where the
        job does not validate."""
        self.phase = f"validation after step {self.step}"
        if self.batches.validation is None:
            return None
        self.environment.count_anew()
        loss = self._mean_loss(self.batches.validation)
        others = {
            name: self._mean_loss(objective) for name, objective in self.batches.validations.items()
        }
        corpora = (self.batches.validation, *self.batches.validations.values())
        self.last_validation = {
            "samples": [self.batches.eval_samples(objective) for objective in corpora],
            "traffic": self.environment.traffic.snapshot(),
        }
        return ValidationLosses(loss, others)

    def _mean_loss(self, objective: Objective) -> float:
        """Over its validation samples, each counted once whatever the number of replicas."""
        batches, counted = self.batches.evaluation(objective)
        total = self.pipeline.evaluate(batches, counted=counted)
        mean = total / self.batches.eval_samples(objective)
        return reduce_status(StepStatus(mean), self.mesh).loss

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one, and wait until it is published;
        every rank calls it. Raises SaveFailed where a file cannot be written, on this rank or on
        another."""
        self.begin_save()
        self.saver.finish()

    def begin_save(self) -> None:
        """As `save`, but returns when training may go on (saver.py), and raises SaveFailed where
        the save before failed."""
        names = {p: name for p, name in self.names.items() if self.partition.owns(name)}
        with self.profile.span("checkpoint"):
            self.saver.save(self.step, names, self.optimizer, scale=self.loss_scale)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint, whatever layout wrote it. Raises InputError where it is
        damaged or of another model."""
        self.phase = f"loading {folder.name}"
        manifest = loader.load(
            folder,
            self.names,
            self.optimizer,
            model=self.partition.names,
            may_lack=padding_rows(self.partition.model),
        )
        self.step = manifest.step
        self.fp8.load(manifest.fp8)
        if self.loss_scale:
            self.loss_scale.load(manifest.loss_scale)
        self.saver.saved.add(self.step)


def _is_due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
