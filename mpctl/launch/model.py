"""A trained model by its path: what it is, which checkpoint, which tokenizer; headers alone are
read. The path is a run, one of its checkpoints, an import, or a Hugging Face directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpctl.errors import InputError
from mpctl.shards import checkpoints, newest_whole
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.model import Model


@dataclass(frozen=True)
class Trained:
    """origin: what the workers read the values from, one checkpoint of a run or import; run: its
    directory where it is a run; job: the run's own, else one of the model alone; step: of the
    checkpoint; own_ends: tokens that end a text
    by a Hugging Face directory's own configuration."""

    origin: Path
    job: JobSpec
    model: Model
    tokenizer: Path | None
    run: Path | None = None
    step: int | None = None
    own_ends: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


def open_trained(path: Path, *, step: int | None = None) -> Trained:
    """The newest whole checkpoint of a run, or that of a step. Raises InputError where there is no
    model, or no such checkpoint. Files are compared by size, not by hash."""
    from mpctl.weights.hub import Hub
    from mpctl.weights.origin import open_origin

    chosen, warnings = _newest(path) if step is None else (_of_step(path, step), ())
    found = open_origin(chosen)
    if isinstance(found, Hub):
        return Trained(
            path, JobSpec(model=found.model), found.model, found.tokenizer,
            own_ends=tuple(_ends(path)),
        )  # fmt: skip
    own = found.folder / "job.json"
    job = load_job(str(own)) if own.is_file() else JobSpec(model=found.model)
    run = found.folder if own.is_file() else None
    return Trained(
        found.checkpoint, job, found.model, found.tokenizer, run, found.step, warnings=warnings
    )


def _newest(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The newest whole checkpoint of a run, with what to say of damaged ones that are newer; any
    other path as it is."""
    saved = checkpoints(path / "checkpoints")
    if not saved:
        return path, ()
    found, broken = newest_whole(saved, hashed=False)
    if found is None:
        raise InputError(issue for _, issues in broken for issue in issues)
    return found[1], tuple(f"{folder} is damaged ({issues[0].message}); step {found[0]} is taken"
                           for folder, issues in broken)  # fmt: skip


def _of_step(path: Path, step: int) -> Path:
    saved = dict(checkpoints(path / "checkpoints"))
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
