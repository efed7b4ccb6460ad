"""What a resumed run goes on from: its newest whole checkpoint, found before a rank starts.

The bytes of a checkpoint are hashed once, here; the ranks compare sizes. A
checkpoint that is damaged is passed over for the one before it, with a warning that says which, why
and what is used instead; a run is refused only when none of its checkpoints is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mpctl.errors import Issue
from mpctl.launch.verify import Progress, newest_verified
from mpctl.rundir.checkpoints import DOCUMENTS, list_checkpoints
from mpctl.rundir.directory import RunDir
from mpctl.rundir.metrics import foreign_lines, foreign_text
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.training import TrainingSpec
from mpctl.units import plural

# What may differ between a run and its resumption without changing the shape of any weight.
RESHAPES_NOTHING = ("name", "source", "vocab_divisor", "seq_length", "attention", "norm_epsilon")


@dataclass(frozen=True)
class Resumption:
    """step: updates done so far, 0 without a checkpoint; damaged: checkpoints that are newer than
    it and cannot be used, each with what is wrong; saved: how many there are in all."""

    run: RunDir
    step: int = 0
    folder: Path | None = None
    damaged: tuple[tuple[Path, tuple[Issue, ...]], ...] = ()
    saved: int = 0

    @property
    def issues(self) -> list[Issue]:
        """Why the run cannot be resumed: there are checkpoints and none is whole."""
        if self.folder is not None or not self.damaged:
            return []
        hint = "start the run anew with --overwrite, or restore one of them from a backup"
        return [replace(issue, hint=hint) for _, issues in self.damaged for issue in issues]

    def warnings(self) -> Iterator[str]:
        """What is taken in place of something damaged."""
        for path, issues in self.damaged if self.folder else ():
            whats = f"{issues[0].where}: {issues[0].message}"
            yield (f"{path} is damaged ({whats}): resuming from step {self.step}; "
                   "the damaged one is renamed and kept")  # fmt: skip
        if self.folder is None and (steps := self.run.last_step()):
            yield (f"{self.run.path} holds no checkpoint: training starts at step 1, and the "
                   f"records of {plural(steps, 'step')} are dropped; training.checkpoint_interval "
                   "saves in between")  # fmt: skip
        for name in DOCUMENTS:
            used = self.run.document(name)
            if used.parent != self.run.path:
                yield f"{self.run.path / name} is damaged: its copy {used} is used"
        if numbers := foreign_lines(self.run.metrics):
            yield foreign_text(self.run.metrics, numbers)


def find_resumption(run: RunDir, on_progress: Progress) -> Resumption:
    """Look at a run's checkpoints, newest first, until one is whole; about a second a GB."""
    saved = list_checkpoints(run.path / "checkpoints")
    found, broken = newest_verified(saved, on_progress)
    step, folder = found or (0, None)
    damaged = tuple((path, tuple(issues)) for path, issues in broken)
    return Resumption(run, step, folder, damaged, len(saved))


def model_issues(job: JobSpec, before: JobSpec, run: RunDir) -> Iterator[Issue]:
    """A run goes on with the model that was trained."""
    now, then = job.model, before.model
    for key in type(now).model_fields if now and then else ():
        new, old = getattr(now, key), getattr(then, key)
        if new != old and key not in RESHAPES_NOTHING:
            yield Issue("resume-model", f"model.{key}", f"{new!r}, but the run in {run.path} has "
                        f"{old!r}", "resume with the model that was trained")  # fmt: skip


def job_before(run: RunDir) -> JobSpec:
    """The job that the run was last started with."""
    return load_job(str(run.document("job.json")))


# ---------------------------------------------------------------- settings that were changed

# Settings that do not change what is computed in a step, but for rounding, or not any more.
NEUTRAL = {
    "training": {"micro_batch_size", "recompute", "partition_activations", "offload_activations",
                 "eval_interval", "eval_samples", "checkpoint_interval", "checkpoint_at_end",
                 "keep_last", "keep_every", "init_from", "init_std", "loss_scale", "runtime"},
    "data": {"validation"},
    "model": {"name", "source", "vocab_divisor", "attention"},
}  # fmt: skip
OF_PREPARING = ("corpus", "tokenizer", "validation_fraction", "max_bytes")
DTYPES = ("dtype", "gradient_dtype")


def changed_settings(now: JobSpec, then: JobSpec, resumption: Resumption) -> Iterator[str]:
    """Each setting that differs from the run so far and changes how it goes on: what it is, what it
    was and what follows. All settings of training, data and model count but the NEUTRAL ones, so
    that a new one is never passed over in silence."""
    for table, neutral in NEUTRAL.items():
        new, old = getattr(now, table), getattr(then, table)
        for key in type(new).model_fields if new and old else ():
            value, before = getattr(new, key), getattr(old, key)
            is_free = key == "steps" and _rates_are_free_of_steps(now.training)
            if value != before and key not in neutral and not is_free:
                follows = _follows(table, key, now, then, resumption)
                yield f"{table}.{key} is {_text(value)}, it was {_text(before)}: {follows}"


def _rates_are_free_of_steps(training: TrainingSpec) -> bool:
    """Whether a run that is resumed with more steps keeps its learning rates
    (runtime/lr_schedule.py)."""
    return training.lr_schedule == "constant" or training.lr_decay_steps is not None


def _follows(table: str, key: str, now: JobSpec, then: JobSpec, resumption: Resumption) -> str:
    step = resumption.step + 1
    own_data = now.data.path is None and (resumption.run.path / "data").is_dir()
    if table == "data" and key in OF_PREPARING and own_data:
        return f"this has no effect, since {resumption.run.path / 'data'} is prepared already"
    if table == "data":
        return f"from step {step} on the samples are those of other data"
    if key == "global_batch_size":
        first, last = (
            resumption.step * (job.training.global_batch_size or 1) for job in (now, then)
        )
        moved = "left out" if first > last else "read again"
        return (f"step {step} begins with sample {first:,} of the data instead of {last:,}, so "
                f"{abs(first - last):,} samples are {moved}")  # fmt: skip
    if key == "seed":
        return f"from step {step} on samples come in another order, with other dropout masks"
    if key == "seq_length":
        return f"from step {step} on the data are cut into other samples"
    if key in DTYPES:
        return f"from step {step} on results are rounded otherwise"
    if key == "steps" or any(word in key for word in ("rate", "warmup", "schedule", "decay_")):
        return f"the learning rate follows the new schedule from step {step} on, so it may jump"
    return f"from step {step} on training follows another rule"


def _text(value: object) -> str:
    return json.dumps(value, default=str)
