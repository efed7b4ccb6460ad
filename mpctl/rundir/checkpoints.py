"""The files of a checkpoint, read without torch: which are there and whether they are whole.

RUN/checkpoints/step-N/ appears by a rename of a finished directory. What lies beside it under other
names is never taken for a checkpoint, but for one case: a save that replaces a checkpoint of the
same step renames the old one to `.step-N.replaced` first, and if it dies before the second rename,
the old one is what there is. What the tensors mean is runtime/checkpointing/loader.py's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, model_validator

from mpctl.durable import remove
from mpctl.errors import InputError, Issue

SCHEMA = "mpctl.checkpoint/1"
MANIFEST = "manifest.json"
DOCUMENTS = ("job.json", "plan.json")  # of a run, copied into each of its checkpoints
STEP = re.compile(r"step-(\d+)")
PARTIAL, REPLACED, PRUNED = "partial", "replaced", "pruned"
HASHED_AT_ONCE = 4  # files; a disk reads faster than one thread hashes
SHOWN_ISSUES = 20

OnBytes = Callable[[int], None]


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
        """Steps that changed the parameters, for a checkpoint that does not count them by
        parameter."""
        return self.step - int(self.loss_scale.get("skipped", 0))


class ParameterPlacement(BaseModel):
    """Where the part of a parameter that a shard holds belongs: full shape, the dimension that is
    split, the ranges [start, stop) kept of it, and the updates that its moments have seen."""

    model_config = ConfigDict(strict=True, extra="ignore")
    shape: list[NonNegativeInt]
    dim: NonNegativeInt | None
    blocks: list[tuple[NonNegativeInt, NonNegativeInt]]
    updates: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _lies_inside(self) -> ParameterPlacement:
        if self.dim is None:
            if self.blocks:
                raise ValueError("has blocks, but no dimension that is split")
            return self
        if self.dim >= len(self.shape):
            raise ValueError(f"dimension {self.dim} of a shape of {len(self.shape)}")
        for start, stop in self.blocks:
            if not start <= stop <= self.shape[self.dim]:
                raise ValueError(f"block [{start}, {stop}) of {self.shape[self.dim]} rows")
        return self


class ShardRecord(BaseModel):
    """shard-K.json: size and sha256 of the file beside it, and what the file holds."""

    model_config = ConfigDict(strict=True, extra="ignore")
    bytes: NonNegativeInt
    sha256: str
    parameters: dict[str, ParameterPlacement]
    frozen: list[str] = []


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Every checkpoint by its step, oldest first."""
    found = {path.name: path for path in root.glob(f".step-*.{REPLACED}")}
    found = {name[1 : -len(f".{REPLACED}")]: path for name, path in found.items()}
    found |= {path.name: path for path in root.glob("step-*")}
    matches = [(STEP.fullmatch(name), path) for name, path in found.items()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def newest_checkpoint(run: Path) -> Path | None:
    """The last one of RUN/checkpoints; None without any."""
    saved = list_checkpoints(run / "checkpoints")
    return saved[-1][1] if saved else None


def partial_path(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is assembled."""
    return sibling(root / f"step-{step}", PARTIAL)


def sibling(path: Path, state: str) -> Path:
    """`.step-N.STATE` beside `step-N`, where it is no checkpoint."""
    return path.with_name(f".{path.name}.{state}")


def recover(root: Path) -> None:
    """After a crash: give a checkpoint that was being replaced its name again, and remove what was
    half written or half removed. Nothing may be saving meanwhile."""
    for path in root.glob(f".step-*.{REPLACED}"):
        final = root / path.name[1 : -len(f".{REPLACED}")]
        if final.exists():
            remove(path)
        else:
            path.rename(final)
    for state in (PARTIAL, PRUNED):
        for path in root.glob(f".step-*.{state}"):
            remove(path)


def prunable(steps: Sequence[int], *, last: int, every: int) -> list[int]:
    """Steps whose checkpoints need not be kept, of those saved, in ascending order.

    last: how many of the newest to keep, 0 for all; every: keep multiples of it too, 0 for none.

    >>> prunable([10, 20, 30, 40, 50], last=2, every=20)
    [10, 30]
    """
    if last == 0:
        return []
    return [step for step in steps[:-last] if not (every and step % every == 0)]


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Raises InputError when it is missing or is none."""
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
        if manifest.step < 0 or not 0 <= manifest.updates <= manifest.step:
            raise ValueError(f"{manifest.updates} updates in {manifest.step} steps")
        return manifest
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None


def read_shard_record(
    folder: Path, index: int, *, hashed: bool = True, on_bytes: OnBytes | None = None
) -> dict[str, Any]:
    """The record beside shard `index`; raises InputError when the shard is not what it says.

    hashed=False compares sizes only. on_bytes: told how many bytes were hashed since the last call.
    """
    path = shard_path(folder, index)
    try:
        record = ShardRecord.model_validate_json(_read(path.with_suffix(".json")))
    except ValidationError as error:
        raise damaged(path.with_suffix(".json"), _first(error)) from None
    try:
        size = path.stat().st_size
        if size != record.bytes:
            raise damaged(path, f"has {size} bytes, {record.bytes} were written")
        if hashed and sha256(path, on_bytes) != record.sha256:
            raise damaged(path, "its bytes are not those that were written (sha256 differs)")
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from None
    return record.model_dump()


def damage(folder: Path, *, hashed: bool = True, on_bytes: OnBytes | None = None) -> list[Issue]:
    """What is wrong with a checkpoint's files, as many issues as a reader can use.

    hashed: also hash all files, about a second a GB; else sizes are compared.
    """
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return list(error.issues)

    def look(index: int) -> Sequence[Issue]:
        try:
            read_shard_record(folder, index, hashed=hashed, on_bytes=on_bytes)
        except InputError as error:
            return error.issues
        return ()

    issues: list[Issue] = []
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        for first in range(0, manifest.shards, SHOWN_ISSUES):
            for found in pool.map(look, range(first, min(first + SHOWN_ISSUES, manifest.shards))):
                issues += found
            if len(issues) >= SHOWN_ISSUES:
                break
    return issues


def checkpoint_bytes(folder: Path) -> int:
    """Size of all its shards."""
    sizes = (path.stat().st_size for path in folder.glob("shard-*.safetensors"))
    return sum(sizes)


def newest_whole(
    saved: Sequence[tuple[int, Path]], *, hashed: bool = True, on_bytes: OnBytes | None = None
) -> tuple[tuple[int, Path] | None, list[tuple[Path, list[Issue]]]]:
    """The newest whole checkpoint, or None, and the damaged ones that are newer, each with what is
    wrong with it. saved: (step, folder) of all checkpoints, oldest first."""
    broken: list[tuple[Path, list[Issue]]] = []
    for step, folder in reversed(saved):
        issues = damage(folder, hashed=hashed, on_bytes=on_bytes)
        if not issues:
            return (step, folder), broken
        broken.append((folder, issues))
    return None, broken


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that nothing takes it for one; returns where it is kept."""
    taken: Collection[str] = {path.name for path in folder.parent.iterdir()}
    name = f"damaged-{folder.name.strip('.')}"
    names = (name if n == 1 else f"{name}-{n}" for n in count(1))
    return folder.rename(folder.with_name(next(name for name in names if name not in taken)))


def damaged(path: Path, why: str) -> InputError:
    """An error that names a file, or a whole checkpoint."""
    folder = path if STEP.fullmatch(path.name) else path.parent
    hint = f"remove {folder} to use the checkpoint before it"
    return InputError.of("checkpoint-damaged", str(path), why, hint)


def sha256(path: Path, on_bytes: OnBytes | None = None) -> str:
    """SHA-256 of a file, in hexadecimal. on_bytes: called with the count of bytes just read."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 24):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


def _first(error: ValidationError) -> str:
    """`parameters.head.weight.blocks: Field required`, of the first mistake."""
    first = error.errors()[0]
    return ": ".join([*([".".join(map(str, first["loc"]))] if first["loc"] else []), first["msg"]])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None
