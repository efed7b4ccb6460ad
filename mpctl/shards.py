"""The files of a checkpoint, read without torch: which are there and whether they are whole.

RUN/checkpoints/step-N/ appears by a rename of a finished directory, so one that lacks a file was
damaged afterwards: it is never passed over in silence. What the tensors mean is checkpoint.py's.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpctl.errors import InputError, Issue

SCHEMA = "mpctl.checkpoint/1"
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Manifest:
    """shards: in all; of pipeline stage S those from S tp to (S + 1) tp - 1. loss_scale: of an fp16
    run (runtime/loss_scale.py)."""

    step: int
    shards: int
    tp: int
    loss_scale: dict[str, float] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """Steps that changed the parameters."""
        return self.step - int(self.loss_scale.get("skipped", 0))


def checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Every checkpoint by its step, oldest first."""
    found = [(STEP.fullmatch(path.name), path) for path in root.glob("step-*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def newest_checkpoint(run: Path) -> Path | None:
    """The last one of RUN/checkpoints; None without any."""
    saved = checkpoints(run / "checkpoints")
    return saved[-1][1] if saved else None


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    document = _read_json(path)
    try:
        if document["schema"] != SCHEMA:
            raise damaged(path, f"schema {document['schema']!r}, expected {SCHEMA!r}")
        shards = int(document["shards"])
        # One that does not say has a single stage: cuts into several always say it.
        scale = {str(k): float(v) for k, v in document.get("loss_scale", {}).items()}
        manifest = Manifest(int(document["step"]), shards, int(document.get("tp", shards)), scale)
        if manifest.tp < 1 or shards < 1 or shards % manifest.tp:
            raise ValueError(f"{shards} shards are no stages of tp {manifest.tp}")
        return manifest
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None


def read_shard_record(folder: Path, index: int, *, hashed: bool = True) -> dict[str, Any]:
    """The record beside shard `index`; raises InputError when the shard is not what it says.

    hashed=False compares sizes only.
    """
    path = shard_path(folder, index)
    record = _read_json(path.with_suffix(".json"))
    try:
        size, digest = path.stat().st_size, sha256(path) if hashed else record["sha256"]
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from None
    if size != record["bytes"]:
        raise damaged(path, f"has {size} bytes, {record['bytes']} were written")
    if digest != record["sha256"]:
        raise damaged(path, "its bytes are not those that were written (sha256 differs)")
    return dict(record)


def damage(folder: Path) -> list[Issue]:
    """Everything wrong with a checkpoint's files; about a second a GB."""
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return list(error.issues)
    issues: list[Issue] = []
    for index in range(manifest.shards):
        try:
            read_shard_record(folder, index)
        except InputError as error:
            issues += error.issues
    return issues


def damaged(path: Path, why: str) -> InputError:
    folder = path if STEP.fullmatch(path.name) else path.parent
    hint = f"remove {folder} to resume from the checkpoint before it"
    return InputError.of("checkpoint-damaged", str(path), why, hint)


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from None
    except ValueError as error:
        raise damaged(path, str(error)) from None
