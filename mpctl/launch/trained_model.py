"""A trained model by its path: what it is, which checkpoint, which tokenizer. The path is a run,
one of its checkpoints, an import, or a Hugging Face directory. The bytes of a checkpoint are
verified here, once, before a worker starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpctl.errors import InputError
from mpctl.launch.verify import Progress, newest_verified, unseen
from mpctl.rundir.checkpoints import list_checkpoints
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec


@dataclass(frozen=True)
class TrainedModel:
    """origin: what the workers read the values from, one checkpoint of a run or import; run: its
    directory where it is a run; job: the run's own, else one of the model alone; step: of the
    checkpoint; own_ends: tokens that end a text
    by a Hugging Face directory's own configuration."""

    origin: Path
    job: JobSpec
    model: ModelSpec
    tokenizer: Path | None
    run: Path | None = None
    step: int | None = None
    own_ends: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


def open_trained(
    path: Path, *, step: int | None = None, on_progress: Progress = unseen
) -> TrainedModel:
    """The newest whole checkpoint of a run, or that of a step. Raises InputError where there is no
    model, or no such checkpoint. The sha256 of all its files is compared, about a second a GB;
    on_progress is told of the stage `verify`, in bytes."""
    from mpctl.weights.hub import Hub
    from mpctl.weights.origin import open_origin

    chosen, warnings = _newest(path, _candidates(path, step), on_progress)
    found = open_origin(chosen)
    if isinstance(found, Hub):
        return TrainedModel(
            path, JobSpec(model=found.model), found.model, found.tokenizer,
            own_ends=tuple(_ends(path)),
        )  # fmt: skip
    own = found.folder / "job.json"
    job = load_job(str(own)) if own.is_file() else JobSpec(model=found.model)
    run = found.folder if own.is_file() else None
    return TrainedModel(
        found.checkpoint, job, found.model, found.tokenizer, run, found.step, warnings=warnings
    )


def _candidates(path: Path, step: int | None) -> list[tuple[int, Path]]:
    """The checkpoints that may be used, oldest first: that of a step, that which the path is
    itself, or all of a run; none of a Hugging Face directory."""
    if step is not None:
        return [(step, _of_step(path, step))]
    if path.parent.name == "checkpoints":
        return [(number, path) for number, each in list_checkpoints(path.parent) if each == path]
    return list_checkpoints(path / "checkpoints")


def _newest(
    path: Path, saved: list[tuple[int, Path]], on_progress: Progress
) -> tuple[Path, tuple[str, ...]]:
    """The newest whole checkpoint of those saved, with what to say of damaged ones that are newer;
    the path as it is where there are none."""
    if not saved:
        return path, ()
    found, broken = newest_verified(saved, on_progress)
    if found is None:
        raise InputError(issue for _, issues in broken for issue in issues)
    return found[1], tuple(f"{folder} is damaged ({issues[0].message}); step {found[0]} is taken"
                           for folder, issues in broken)  # fmt: skip


def _of_step(path: Path, step: int) -> Path:
    saved = dict(list_checkpoints(path / "checkpoints"))
    if step in saved:
        return saved[step]
    held = ", ".join(map(str, sorted(saved))) or "none"
    raise InputError.of("no-such-step", "--step", f"{path} has no checkpoint of step {step}",
                        f"it has {held}")  # fmt: skip


def _ends(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json: a number, a list or absent."""
    for name in ("generation_config.json", "config.json"):
        try:
            said: Any = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        ends = said.get("eos_token_id") if isinstance(said, dict) else None
        ends = ends if isinstance(ends, list) else [ends]
        if found := [end for end in ends if type(end) is int]:
            return found
    return []
