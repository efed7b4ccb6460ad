"""The training loop: micro batches in, one update a step, one record a step.

The loss of a step is the mean over the samples of the global batch. Each micro batch's summed loss
is divided by the global number of samples before backward, so that gradients are only ever summed,
over micro batches and replicas, and every layout computes the same number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from mpctl.records.checkpoint.manifest import MANIFEST, BaseReference, damage_error
from mpctl.records.rundir.rank_files import StepRecord, Traffic, ValidationReport
from mpctl.records.rundir.summary import WARM_UP_STEPS
from mpctl.spec.job import JobSpec
from mpctl.train.checkpoint.reader import ReadTargets, load_checkpoint, padding_rows
from mpctl.train.checkpoint.saver import Saver
from mpctl.train.families.implementation import Objective
from mpctl.train.layers.fp8 import Fp8Scales, HeldWeights
from mpctl.train.layers.parameters import stored_of
from mpctl.train.runtime.batches import Batches
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.memory import Kind, MemoryWatch
from mpctl.train.runtime.mesh import Mesh
from mpctl.train.runtime.optimizer import Optimizer
from mpctl.train.runtime.partition import PipelinePartition
from mpctl.train.runtime.pipeline import PipelineRunner
from mpctl.train.runtime.profile import StepProfile
from mpctl.train.runtime.routing import StepRouting
from mpctl.train.runtime.step_guard import GradientInspector, StepDecision, StepGuard, refusal
from mpctl.train.runtime.step_record import SharedStatus, share_status, total_over_ranks
from mpctl.train.runtime.update import LossScale, Updater
from mpctl.train.runtime.zero.gradients import GradientBuffer
from mpctl.train.runtime.zero.overlap import GradientOverlap, Inspect


@dataclass
class Trainer:
    """One rank's training.

    model: all chunks of this rank's stage. fp8: the table of scales. routing: what its routers did
    in the last step, and their biases. step: updates so far; taken: those of this attempt.
    step_traffic: collectives of the last step. updater: has the loss scale of fp16; guard: decides
    about steps that are not finite or spike; memory_watch: measures the memory of one step.
    """

    mesh: Mesh
    model: nn.Module
    pipeline: PipelineRunner
    gradients: GradientOverlap
    optimizer: Optimizer
    batches: Batches
    saver: Saver
    environment: RuntimeEnvironment
    fp8: Fp8Scales
    fp8_weights: HeldWeights = field(default_factory=HeldWeights)
    routing: StepRouting = field(default_factory=StepRouting)
    base: BaseReference | None = None
    step: int = 0
    taken: int = 0
    step_traffic: Traffic = field(default_factory=dict)
    last_validation: ValidationReport | None = None

    def __post_init__(self) -> None:
        training, environment = self.job.training, self.environment
        self.memory_watch = MemoryWatch(self.job, environment)
        self.guard = StepGuard(training)
        self.updater = Updater(training, self.buffer, self.optimizer, self.profile, runs_ahead=environment.runs_ahead)

    @property
    def partition(self) -> PipelinePartition:
        """The job's layout as this rank's stage sees it."""
        return self.pipeline.partition

    @property
    def job(self) -> JobSpec:
        """The job that is run."""
        return self.partition.job

    @property
    def buffer(self) -> GradientBuffer:
        """Every gradient of this rank."""
        return self.gradients.buffer

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale; None unless in fp16."""
        return self.updater.loss_scale

    @property
    def profile(self) -> StepProfile:
        """Records the timeline of the steps that `launch.profile` names."""
        return self.environment.profile

    @property
    def names(self) -> dict[Tensor, str]:
        """The global name of each parameter of this rank."""
        return {parameter: name for name, parameter in self.model.named_parameters()}

    def state_tensors(self) -> dict[Kind, list[Tensor]]:
        """The tensors that persist from step to step, by kind."""
        optimizer = self.optimizer
        rule = optimizer.rule
        moments = [moment for state in rule.state.values() for name, moment in state.items() if name != "step"]
        stores = (*optimizer.stores, *optimizer.frozen)
        masters = [tensor for store in stores for tensor in store.master_tensors]
        flat = [tensor for store in stores for tensor in store.parameter_tensors]
        stored = [held for p in self.model.parameters() if (held := stored_of(p)) is not None]
        return {
            "optimizer": [*moments, *masters],
            "gradients": self.buffer.tensors,
            "parameters": [*self.model.parameters(), *flat, *(tensor for held in stored for tensor in held.tensors)],
        }

    def passing_tensors(self) -> list[Tensor]:
        """The tensors that are alive now only to be sent, received or reduced."""
        return [*self.pipeline.passing_tensors, *self.gradients.passing_tensors]

    @property
    def doing(self) -> str:
        """Current activity of this rank: `step 3, stage 1, forward of micro batch 2`, and the save
        running in the background, if any."""
        return self.saver.activity(self.environment.activity.text)

    def run(self) -> Iterator[StepRecord]:
        """Train to the last step, or to the first step after a stop was requested.

        Yields one record a step; saves at intervals, at the end and on a stop. A step that is saved
        and validated is saved first, so that a validation that fails loses no training. Returns
        when the last save is published; raises SaveFailed if one failed.
        """
        try:
            yield from self._steps()
        finally:
            self.batches.close()

    def _steps(self) -> Iterator[StepRecord]:
        training, stopping = self.job.training, False
        if self.job.checkpoint.interval:
            self.environment.begin("taking the host memory of checkpoints")
            self.saver.reserve(self._saved_names, self.optimizer)
        initial = self.validate() if training.eval_interval and not self.step else None
        while self.step < training.steps and not stopping:
            record, stopping = self.one_step()
            if self.step == 1 and initial:
                record["initial_validation_loss"], others = initial
                if others:
                    record["initial_validation_losses"] = others
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
                    record["validation_loss"], others = losses
                    if others:
                        record["validation_losses"] = others
            stalled, saved_in = self.saver.take_times()
            if stalled:
                record["save_stall_seconds"] = stalled
            if saved_in is not None:
                record["save_seconds"] = saved_in
            yield record  # before a save, so that every step of a checkpoint has a record
            if saves:
                self.begin_save()
        self.profile.finish()
        self.optimizer.wait_for_parameters()
        self.saver.finish()

    def _saves(self, stopping: bool) -> bool:
        saving = self.job.checkpoint
        at_end = saving.at_end and self.step == self.job.training.steps
        return stopping or at_end or _is_due(saving.interval, self.step)

    def one_step(self) -> tuple[StepRecord, bool]:
        """Train one step; returns its record, and whether any rank was asked to stop.

        All ranks update by the norm that the status brings. If the device runs ahead, the host
        waits for it once, to read the status: before the update if the guard needs the loss,
        otherwise after an update that the device itself makes or skips. Raises StepRefused if the
        guard ends the run or asks for a rollback: NotFinite, naming the rank that caused it, if the
        loss or, outside of fp16, the gradient norm is not finite.
        """
        self.profile.begin_step(self.step + 1)
        self.environment.begin(f"step {self.step + 1}")
        began, cpu_began = time.perf_counter(), time.process_time()
        was_saving = self.saver.is_saving
        needs_loss, read = self.guard.needs_loss, self.environment.read_figures
        is_early = needs_loss or not self.environment.runs_ahead
        is_last = self.step + 1 == self.job.training.steps
        watched = self.optimizer, self.state_tensors, self.passing_tensors
        with self.memory_watch.step(*watched, is_last=is_last):
            loss = self._compute_gradients()
            shared = self._share_status(loss)
            if is_early:
                status = shared.read(read)
                decision = self._check(loss, status.loss if needs_loss else None, status.norm)
                update = self.updater.step(self.step, shared.norm, status.norm, decision)
            else:
                self.updater.step_async(self.step, shared.norm)
            self.fp8.end_step(self.mesh.world)
        if not is_early:
            status = shared.read(read)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        self.profile.end_step()
        spent = self._log_step(seconds, cpu_seconds, is_compared=not was_saving)
        if not is_early:
            self.updater.resolve(status.norm)
            decision = self._check(loss, None, status.norm)
            update = self.updater.result(self.step, status.norm, decision)
        if not needs_loss:
            self._check(loss, status.loss, 0.0, is_updated=True)
        if not update.get("skipped"):
            self.guard.made_update(status.loss)
            self.routing.apply()
        self.step += 1
        self.step_traffic = self.environment.traffic.snapshot()
        tokens = self.partition.layout.tokens_per_step
        record: StepRecord = {
            "step": self.step,
            "loss": status.loss if math.isfinite(status.loss) else None,
            "tokens": self.step * tokens,
            "step_seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "tokens_per_second": tokens / seconds,
            "communication_seconds": spent,
            **update,  # type: ignore[typeddict-item]
            "memory_bytes": status.memory,
            "predicted_step_seconds": self.job.launch.predicted_step_seconds,
        }
        record.update(self.routing.figures(status.sums, status.known))  # type: ignore[typeddict-item]
        return record, status.stop

    def _log_step(self, seconds: float, cpu_seconds: float, *, is_compared: bool) -> dict[str, float]:
        """Log the step that has ended for the launcher (records/rundir/step_log.py); returns its seconds in
        collectives by axis. is_compared: whether no checkpoint was being written as it began."""
        communication, steps = self.environment.communication, self.environment.steps
        spent = communication.snapshot()
        self.taken += 1
        if steps is not None and self.taken > WARM_UP_STEPS:
            is_compared = is_compared and not self.saver.is_saving
            steps.add(
                self.step + 1,
                seconds=seconds,
                processor=cpu_seconds,
                computing=seconds - sum(spent.values()) if is_compared else None,
                waits=communication.of_groups,
                sizes=communication.bytes,
            )
        return spent

    def _compute_gradients(self, inspect: Inspect | None = None) -> Tensor:
        """Gradients of one step, reduced over all ranks; returns this rank's share of the loss.
        inspect: called with each bucket's gradients of this rank before they are reduced."""
        self.buffer.zero()
        self.gradients.restart(inspect)
        batches = self.profile.each("data", self.batches.training_step(self.step))
        self.routing.begin(self.updater.scale)
        self.fp8_weights.release()  # a checkpoint may have been loaded
        loss = self.pipeline.train(batches, step=self.step, scale=self.updater.scale)
        self.fp8_weights.release()
        with self.profile.span("gradients"):
            self.gradients.finish()
            self.buffer.sum_parts()
        self.routing.end()
        return loss

    def _share_status(self, loss: Tensor) -> SharedStatus:
        environment, norm = self.environment, self.updater.norm()
        with self.profile.span("status"):
            return share_status(
                loss,
                norm,
                self.mesh,
                stop=environment.stop_requested() or self.saver.has_failed,
                peak_memory=environment.peak_memory(),
                shares=self.routing.shares(),
                known=self.routing.loads(),
            )

    def _check(self, loss: Tensor, shared: float | None, norm: float, *, is_updated: bool = False) -> StepDecision:
        """Decide whether to update or skip. loss: this rank's; shared: that of all ranks, None if
        it is not known yet. Raises StepRefused if the step ends the run or rolls it back; unless
        the parameters are updated already, the gradients are then computed again, to find the rank
        on which they are not finite."""
        is_fp16 = self.loss_scale is not None
        decision = self.guard.check(self.step + 1, shared, norm, may_overflow=is_fp16)
        if decision.action in ("update", "skip"):
            return decision

        def find() -> tuple[int, str]:
            self.optimizer.wait_for_parameters()  # the inspection reads published parameters
            inspector = GradientInspector(self.names)
            if not is_updated:
                self._compute_gradients(inspector.look)
            return inspector.evidence(float(loss))

        raise refusal(decision, self.step + 1, self.mesh, find)

    @torch.no_grad()
    def validate(self) -> tuple[float, dict[str, float]] | None:
        """The mean loss over the validation samples, without dropout: of the data's validation
        split, and of additional corpora by name. None if the job does not validate."""
        if self.batches.validation is None:
            return None
        self.environment.begin(f"validation after step {self.step}")
        loss = self._mean_loss(self.batches.validation)
        others = {name: self._mean_loss(objective) for name, objective in self.batches.validations.items()}
        corpora = (self.batches.validation, *self.batches.validations.values())
        self.last_validation = {
            "samples": [self.batches.eval_samples(objective) for objective in corpora],
            "traffic": self.environment.traffic.snapshot(),
        }
        return loss, others

    def _mean_loss(self, objective: Objective) -> float:
        """The mean over its validation samples, each counted once at any number of replicas."""
        batches, counted = self.batches.evaluation(objective)
        total = self.pipeline.evaluate(batches, counted=counted)
        mean = total / self.batches.eval_samples(objective)
        return total_over_ranks(mean, self.mesh)

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one, and wait until it is published;
        every rank calls it. Raises SaveFailed if a file cannot be written on this rank or
        another."""
        self.begin_save()
        self.saver.finish()

    def begin_save(self) -> None:
        """As `save`, but returns as soon as training may continue (saver.py). Raises SaveFailed if
        the previous save failed."""
        with self.profile.span("checkpoint"):
            tables = {
                "loss_scale": self.loss_scale.state() if self.loss_scale else {},
                "fp8": self.fp8.state(),
                "base": self.base,
                **self.routing.state(),
            }
            self.saver.save(self.step, self._saved_names, self.optimizer, tables=tables)

    @property
    def _saved_names(self) -> dict[Tensor, str]:
        """The names of the parameters that this rank saves."""
        return {p: name for p, name in self.names.items() if self._writes(name)}

    def _writes(self, name: str) -> bool:
        """Whether this rank saves a parameter: its first replica, on the first of its stages."""
        view = self.partition.view_of(name)
        is_first = self.mesh.groups[view.replica_group].rank == 0
        return is_first and self.partition.owns(name) and self.partition.layout.is_saved(name)

    def resume(self, folder: Path, read_base: ReadTargets | None = None) -> None:
        """Continue from a checkpoint of any layout. read_base: reads frozen parameters that it does
        not hold. Raises InputError if it is damaged or of another model."""
        self.environment.begin(f"loading {folder.name}")
        manifest = load_checkpoint(
            folder,
            self.names,
            self.optimizer,
            model={weight.name for weight in self.partition.layout.table.weights()},
            may_lack=padding_rows(self.partition.model, self.job.training.adapter),
            read_base=read_base,
        )
        self.step, self.base = manifest.step, manifest.base
        self.fp8.load(manifest.fp8)
        try:
            self.routing.log.load(manifest.router_bias, manifest.router_counts)
            if self.loss_scale:
                self.loss_scale.load(manifest.loss_scale)
        except ValueError as error:
            raise damage_error(folder / MANIFEST, str(error)) from None
        self.saver.saved.add(self.step)


def _is_due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
