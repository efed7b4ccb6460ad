"""A trained model by its path: a run, one of its checkpoints, an import, or a Hugging Face
directory. The bytes of a checkpoint are verified here, once, before a worker starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpctl.core.errors import InputError
from mpctl.records.checkpoint.folder import checkpoints_at, list_checkpoints
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.records.checkpoint.verify import Progress, checkpoint_bytes, counted, ignore_progress, newest_undamaged
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec


@dataclass(frozen=True)
class TrainedModel:
    """A model with readable weights.

    origin: what the workers read them from, one checkpoint of a run or of an import, or a Hugging
    Face directory; job: the run's job, else a job with only the model; tokenizer: its
    tokenizer.json, None when there is none next to the model; run: the run's directory; step: of
    the checkpoint; end_tokens: ids that end a text by a Hugging Face directory's configuration.
    """

    origin: Path
    job: JobSpec
    model: ModelSpec
    tokenizer: Path | None
    run: Path | None = None
    step: int | None = None
    end_tokens: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The run's directory, or the origin of a model that is not from a run."""
        return self.run or self.origin

    def tokenizer_or(self, other: Path | None) -> Path | None:
        """The tokenizer.json of `other`, a file or a folder; the model's when it is None."""
        from mpctl.train.data.tokenizer import find_tokenizer

        return self.tokenizer if other is None else find_tokenizer(other)


def open_trained(path: Path, *, step: int | None = None, on_progress: Progress = ignore_progress) -> TrainedModel:
    """The newest undamaged checkpoint of a run, or the one of `step`; or the model in a Hugging
    Face directory.

    The sha256 of all files of the checkpoint is compared, about a second a GB; on_progress is
    called with ("verify", bytes done, bytes in all). Raises InputError when there is no model, or
    no such checkpoint.
    """
    from mpctl.train.weights.hub import Hub
    from mpctl.train.weights.origin import open_origin

    candidates = checkpoints_at(path) if step is None else [(step, _of_step(path, step))]
    chosen, warnings = _newest(path, candidates, on_progress)
    opened = open_origin(chosen)
    if isinstance(opened, Hub):
        job = JobSpec(model=opened.model)
        return TrainedModel(path, job, opened.model, opened.tokenizer, end_tokens=tuple(_end_tokens(path)))
    own_job = opened.folder / "job.json"
    is_run = own_job.is_file()
    return TrainedModel(
        origin=opened.checkpoint,
        job=load_job(str(own_job)) if is_run else _job_of(opened),
        model=opened.model,
        tokenizer=opened.tokenizer,
        run=opened.folder if is_run else None,
        step=opened.step,
        warnings=warnings,
    )


def _job_of(imported: SavedModel) -> JobSpec:
    """A job with the model of an import, and its adapters."""
    return JobSpec(model=imported.model, training=TrainingSpec(adapter=imported.adapter))


def _newest(path: Path, candidates: list[tuple[int, Path]], on_progress: Progress) -> tuple[Path, tuple[str, ...]]:
    """The newest undamaged candidate, and a warning for each damaged one that is newer; `path`
    itself when there are no candidates."""
    if not candidates:
        return path, ()
    on_bytes = counted("verify", checkpoint_bytes(candidates[-1][1]), on_progress)
    newest, damaged = newest_undamaged(candidates, on_bytes=on_bytes)
    if newest is None:
        raise InputError(issue for _, issues in damaged for issue in issues)
    step, folder = newest
    return folder, tuple(
        f"{broken} is damaged ({issues[0].message}): step {step} is used instead" for broken, issues in damaged
    )


def _of_step(path: Path, step: int) -> Path:
    saved = dict(list_checkpoints(path / "checkpoints"))
    if step in saved:
        return saved[step]
    steps = ", ".join(map(str, sorted(saved)))
    hint = f"it has checkpoints of step {steps}" if saved else "it has no checkpoints at all"
    raise InputError.of("no-such-step", "--step", f"{path} has no checkpoint of step {step}", hint)


def _end_tokens(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json: a number, a list or absent."""
    for name in ("generation_config.json", "config.json"):
        try:
            config: Any = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        value = config.get("eos_token_id") if isinstance(config, dict) else None
        tokens = value if isinstance(value, list) else [value]
        if ids := [token for token in tokens if type(token) is int]:
            return ids
    return []
