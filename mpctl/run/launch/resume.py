"""Find the newest undamaged checkpoint of a resumed run before a rank starts.

Here manifest, records and the sizes of files are compared, which takes no longer for a terabyte than for a megabyte.
Ranks compare the bytes while they read them; if they find other bytes, the supervisor sets the checkpoint aside.
Instead of a damaged checkpoint the one before it is used, with a warning that names both and the reason; a run is
refused only when all of its checkpoints are damaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpctl.core.errors import Issue
from mpctl.core.units import plural
from mpctl.records.checkpoint.folder import DOCUMENTS, list_checkpoints
from mpctl.records.checkpoint.verify import newest_undamaged
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.metrics import foreign_lines, foreign_text
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.training import TrainingSpec

SHAPE_NEUTRAL = ("name", "source", "hub_id", "vocab_divisor", "seq_length", "attention", "norm_epsilon")
"""Settings of the model that may differ between a run and its resumption, because they change the
shape of no weight."""
# Settings that do not change what is computed in a step except by rounding, or have no effect after
# the start.
NEUTRAL = {
    "training": {
        "micro_batch_size",
        "recompute",
        "partition_activations",
        "offload_activations",
        "eval_interval",
        "eval_samples",
        "init_from",
        "init_std",
        "loss_scale",
        "runtime",
    },
    "data": {"validation"},
    "model": {"name", "source", "hub_id", "vocab_divisor", "attention"},
}
PREPARE_SETTINGS = ("corpus", "tokenizer", "validation_fraction", "max_bytes")
DTYPES = ("dtype", "gradient_dtype")


@dataclass(frozen=True)
class Resumption:
    """Starting point of a resumed run. step, folder: of the checkpoint, 0 and None without one; damaged: newer
    checkpoints that cannot be used, each with its issues; saved: number of checkpoints."""

    run: RunDir
    step: int = 0
    folder: Path | None = None
    damaged: tuple[tuple[Path, tuple[Issue, ...]], ...] = ()
    saved: int = 0

    @property
    def issues(self) -> list[Issue]:
        """Issues of a run that cannot be resumed: it has checkpoints, and all are damaged."""
        if self.folder is not None or not self.damaged:
            return []
        hint = "start again with --overwrite, or restore one of the checkpoints from a backup"
        return [issue._replace(hint=hint) for _, issues in self.damaged for issue in issues]

    def warnings(self) -> Iterator[str]:
        """Yield warnings about damaged files and about records that are removed or ignored."""
        for path, issues in self.damaged if self.folder else ():
            what = f"{issues[0].where}: {issues[0].message}"
            yield (f"{path} is damaged ({what}): resuming from step {self.step}; the damaged checkpoint is renamed")
        if self.folder is None and (steps := self.run.last_step()):
            yield (
                f"{self.run.path} has no checkpoint: training starts at step 1, and the records of "
                f"{plural(steps, 'step')} are removed; set checkpoint.interval to save "
                "checkpoints during the run"
            )
        for name in DOCUMENTS:
            used = self.run.document(name)
            if used.parent != self.run.path:
                yield f"{self.run.path / name} is damaged: its copy {used} is used instead"
        if numbers := foreign_lines(self.run.metrics):
            yield foreign_text(self.run.metrics, numbers)


def find_resumption(run: RunDir) -> Resumption:
    """Check a run's checkpoints, newest first, until one is complete: all files exist and have the
    sizes that were written."""
    saved = list_checkpoints(run.path / "checkpoints")
    newest, damaged = newest_undamaged(saved, hashed=False)
    step, folder = newest or (0, None)
    issues = tuple((path, tuple(issues)) for path, issues in damaged)
    return Resumption(run, step, folder, issues, len(saved))


def model_issues(job: JobSpec, before: JobSpec, run: RunDir) -> Iterator[Issue]:
    """An issue for each setting of the model that differs from the model of the run."""
    now, then = job.model, before.model
    for key in type(now).model_fields if now and then else ():
        new, old = getattr(now, key), getattr(then, key)
        if new != old and key not in SHAPE_NEUTRAL:
            message = f"{new!r}, but the run in {run.path} has {old!r}"
            yield Issue("resume-model", f"model.{key}", message, "resume with the model of the run")
    yield from _adapter_issues(job.training.adapter, before.training.adapter, run)


def _adapter_issues(now: AdapterSpec | None, then: AdapterSpec | None, run: RunDir) -> Iterator[Issue]:
    """Issues where the adapters are not those of the run: their tensors would be missing or others."""
    from mpctl.train.weights.origin import adapter_differences

    if (now is None) != (then is None):
        has, had = ("adapters", "none") if then is None else ("no adapters", "some")
        hint = "resume as the run began, or start another one from it: training.init_from"
        yield Issue("resume-adapter", "training.adapter", f"{has}, but the run in {run.path} has {had}", hint)
    yield from adapter_differences(now, then, run.path)


def job_before(run: RunDir) -> JobSpec:
    """The job with which the run was last started."""
    return load_job(str(run.document("job.json")))


# ---------------------------------------------------------------- settings that were changed


def changed_settings(now: JobSpec, then: JobSpec, resumption: Resumption) -> Iterator[str]:
    """A warning for each setting that differs from the run so far and changes how it continues. All
    settings of training, data and model are compared except the NEUTRAL ones, so that a setting
    that is added later is never ignored in silence."""
    for table, neutral in NEUTRAL.items():
        new, old = getattr(now, table), getattr(then, table)
        for key in type(new).model_fields if new and old else ():
            value, before = getattr(new, key), getattr(old, key)
            is_free = key == "steps" and _rates_are_free_of_steps(now.training)
            if value != before and key not in neutral and not is_free:
                follows = _consequence(table, key, now, then, resumption)
                yield f"{table}.{key} is {_text(value)}, but was {_text(before)}: {follows}"
    if moved := _moved(now, then):
        yield f"{'; '.join(moved)}: every rank reads its new part of the checkpoint"


def _moved(now: JobSpec, then: JobSpec) -> list[str]:
    """Each changed axis size and tensor-parallel setting that places weights differently."""
    was = {f"parallel.{axis}": size for axis, size in then.sizes.items()}
    new = {f"parallel.{axis}": size for axis, size in now.sizes.items()}
    for key in ("tensor_mode", "tensor_depth", "vpp"):
        was[f"parallel.{key}"] = getattr(then.parallel, key)
        new[f"parallel.{key}"] = getattr(now.parallel, key)
    return [f"{key} is {_text(new[key])}, but was {_text(was[key])}" for key in new if new[key] != was[key]]


def _rates_are_free_of_steps(training: TrainingSpec) -> bool:
    """Whether a run that is resumed with more steps keeps its learning rates
    (train/runtime/optimizer.py)."""
    return training.lr_schedule == "constant" or training.lr_decay_steps is not None


def _consequence(table: str, key: str, now: JobSpec, then: JobSpec, resumption: Resumption) -> str:
    step = resumption.step + 1
    own_data = now.data.path is None and (resumption.run.path / "data").is_dir()
    if table == "data" and key in PREPARE_SETTINGS and own_data:
        return f"this has no effect, since {resumption.run.data} is already prepared"
    if table == "data":
        return f"from step {step} on the samples come from other data"
    if key == "global_batch_size":
        first, last = (resumption.step * (job.training.global_batch_size or 1) for job in (now, then))
        moved = "skipped" if first > last else "used again"
        return (
            f"step {step} begins with sample {first:,} of the data instead of {last:,}, so "
            f"{abs(first - last):,} samples are {moved}"
        )
    if key == "seed":
        return f"from step {step} on samples come in another order, with other dropout masks"
    if key == "seq_length":
        return f"from step {step} on the data are cut into samples of another length"
    if key in DTYPES:
        return f"from step {step} on results are rounded differently"
    if key == "steps" or any(word in key for word in ("rate", "warmup", "schedule", "decay_")):
        return f"the learning rate follows the new schedule from step {step} on, so it may jump"
    return f"from step {step} on it applies to training"


def _text(value: object) -> str:
    return json.dumps(value, default=str)
