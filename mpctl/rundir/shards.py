"""The files of one checkpoint, read without torch: its manifest, its shards, whether they are
undamaged.

mpctl/rundir/checkpoints.py has the layout of the directory. What the tensors mean is known to
runtime/checkpointing/.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from mpctl.errors import InputError, Issue
from mpctl.rundir.checkpoints import STEP, list_checkpoints
from mpctl.shard import Shard

SCHEMA = "mpctl.checkpoint/2"
READ_SCHEMAS = ("mpctl.checkpoint/1", SCHEMA)  # 1: placements have dim and blocks
MANIFEST = "manifest.json"
HASHED_AT_ONCE = 4  # files; a disk reads faster than one thread hashes
SHOWN_ISSUES = 20

OnBytes = Callable[[int], None]
Fp8Histories = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Manifest:
    """manifest.json. step: updates done; shards: number of shards in all, of which pipeline stage S
    has the shards S * tp to (S + 1) * tp - 1; loss_scale: state of the fp16 loss scale
    (runtime/loss_scale.py), empty for other dtypes; fp8: by linear layer the largest elements of X,
    W and dY in the last steps (layers/fp8.py), empty without delayed scaling; save: a
    random name of the save that wrote it, by which two of one step are told apart, empty where
    there was none (older versions, resharded and imported checkpoints)."""

    step: int
    shards: int
    tp: int
    loss_scale: dict[str, float] = field(default_factory=dict)
    fp8: Fp8Histories = field(default_factory=dict)
    save: str = ""

    @property
    def updates(self) -> int:
        """Steps that changed the parameters, for a checkpoint that does not count them by
        parameter."""
        return self.step - int(self.loss_scale.get("skipped", 0))


Blocks = list[tuple[NonNegativeInt, NonNegativeInt]]


class ParameterPlacement(BaseModel):
    """Which part of a parameter a shard holds.

    shape: of the full parameter; cuts: of each dimension that is split, the blocks [start, stop) in
    this shard, in the order of the file; updates: how many updates the optimizer's moments have
    seen. dim, blocks: what older versions wrote in place of cuts; they split one dimension at most.

    >>> ParameterPlacement.of(Shard((8, 4), {0: (range(4, 8),), 1: (range(2),)})).as_record()
    {'shape': [8, 4], 'cuts': {'0': [[4, 8]], '1': [[0, 2]]}}
    """

    model_config = ConfigDict(strict=True, extra="ignore")
    shape: list[NonNegativeInt]
    cuts: dict[NonNegativeInt, Blocks] | None = None
    dim: NonNegativeInt | None = None
    blocks: Blocks | None = None
    updates: NonNegativeInt | None = None

    @classmethod
    def of(cls, shard: Shard, *, updates: int | None = None) -> ParameterPlacement:
        """The placement of a shard."""
        cuts = {dim: [(b.start, b.stop) for b in blocks] for dim, blocks in shard.cuts.items()}
        return cls(shape=list(shard.shape), cuts=cuts, updates=updates)

    def as_record(self) -> dict[str, Any]:
        """What is written of it, for JSON."""
        return self.model_dump(mode="json", exclude_none=True)

    @cached_property
    def shard(self) -> Shard:
        """The part of the parameter. Raises ValueError where it leaves the shape or has an element
        twice."""
        cuts = self.cuts
        if cuts is None:
            cuts = {} if self.dim is None else {self.dim: self.blocks or []}
        by_dim = {dim: tuple(range(*block) for block in blocks) for dim, blocks in cuts.items()}
        return Shard(tuple(self.shape), by_dim)

    @model_validator(mode="after")
    def _is_a_part(self) -> ParameterPlacement:
        given = {name for name in ("dim", "blocks") if name in self.model_fields_set}
        if self.cuts is None and given != {"dim", "blocks"}:
            raise ValueError("has no cuts")
        if self.cuts is not None and given:
            raise ValueError(f"has cuts and {min(given)}")
        if self.dim is None and self.blocks:
            raise ValueError("has blocks, but no dimension that is split")
        _ = self.shard
        return self


class Checksums(BaseModel):
    """CRC-32 of each block of a shard's file, in order; the last block may be shorter."""

    model_config = ConfigDict(strict=True, extra="ignore")
    block_bytes: PositiveInt
    crc32: list[NonNegativeInt]


class ShardRecord(BaseModel):
    """shard-K.json: size and sha256 of the file beside it, the parameters in the file, and those of
    them that are frozen, which have no moments. checksums: of the file's blocks (checksums.py);
    older versions wrote none."""

    model_config = ConfigDict(strict=True, extra="ignore")
    bytes: NonNegativeInt
    sha256: str
    parameters: dict[str, ParameterPlacement]
    frozen: list[str] = []
    checksums: Checksums | None = None


def shard_path(folder: Path, index: int) -> Path:
    """The tensors of shard `index`; its record has the same name with the suffix .json."""
    return folder / f"shard-{index}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises InputError when it is missing or damaged."""
    path = folder / MANIFEST
    document = _read_json(path)
    try:
        if document["schema"] not in READ_SCHEMAS:
            known = " or ".join(map(repr, READ_SCHEMAS))
            raise damage_error(path, f"schema {document['schema']!r}, expected {known}")
        shards = int(document["shards"])
        # Without tp there is a single stage: checkpoints of several stages always have it.
        scale = {str(k): float(v) for k, v in document.get("loss_scale", {}).items()}
        tp, histories = int(document.get("tp", shards)), _fp8_histories(document.get("fp8", {}))
        save = str(document.get("save", ""))
        manifest = Manifest(int(document["step"]), shards, tp, scale, histories, save)
        if manifest.tp < 1 or shards < 1 or shards % manifest.tp:
            raise ValueError(f"{shards} shards is not a multiple of tp {manifest.tp}")
        if manifest.step < 0 or not 0 <= manifest.updates <= manifest.step:
            raise ValueError(f"{manifest.updates} updates in {manifest.step} steps")
        return manifest
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise damage_error(path, f"{type(error).__name__}: {error}") from None


def save_of(folder: Path) -> str:
    """The name of the save that wrote a checkpoint; empty where it has none or cannot be read."""
    try:
        return read_manifest(folder).save
    except InputError:
        return ""


def _fp8_histories(document: Mapping[str, Any]) -> Fp8Histories:
    """Raises ValueError where an entry is not of three numbers that are finite and at least 0."""
    histories = {
        name: [[float(value) for value in step] for step in steps]
        for name, steps in document.items()
    }
    for name, steps in histories.items():
        if any(len(step) != 3 or not all(0 <= v < math.inf for v in step) for step in steps):
            raise ValueError(f"fp8 history of {name} is not of three finite numbers a step")
    return histories


def read_shard_record(
    folder: Path, index: int, *, hashed: bool = True, on_bytes: OnBytes | None = None
) -> ShardRecord:
    """The record of shard `index`. Raises InputError when record or shard are damaged.

    hashed: compare the shard's sha256, else only its size; on_bytes: called with the number of
    bytes hashed since the last call.
    """
    path = shard_path(folder, index)
    try:
        record = ShardRecord.model_validate_json(_read(path.with_suffix(".json")))
    except ValidationError as error:
        raise damage_error(path.with_suffix(".json"), _first(error)) from None
    try:
        size = path.stat().st_size
        if size != record.bytes:
            raise damage_error(path, f"has {size} bytes, {record.bytes} were written")
        if hashed and sha256(path, on_bytes) != record.sha256:
            raise damage_error(path, "its bytes are not those that were written (sha256 differs)")
    except OSError as error:
        raise damage_error(path, error.strerror or str(error)) from None
    return record


def find_damage(
    folder: Path, *, hashed: bool = True, on_bytes: OnBytes | None = None
) -> list[Issue]:
    """What is wrong with a checkpoint's files, at most about SHOWN_ISSUES issues; empty when the
    checkpoint is undamaged.

    hashed: also compare the sha256 of all files, about a second a GB; else only sizes.
    """
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return list(error.issues)

    def check(index: int) -> Sequence[Issue]:
        try:
            read_shard_record(folder, index, hashed=hashed, on_bytes=on_bytes)
        except InputError as error:
            return error.issues
        return ()

    issues: list[Issue] = []
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        for first in range(0, manifest.shards, SHOWN_ISSUES):
            indices = range(first, min(first + SHOWN_ISSUES, manifest.shards))
            for shard_issues in pool.map(check, indices):
                issues += shard_issues
            if len(issues) >= SHOWN_ISSUES:
                break
    return issues


def checkpoint_bytes(folder: Path) -> int:
    """The size of all shards together."""
    return sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))


def newest_undamaged(
    saved: Sequence[tuple[int, Path]], *, hashed: bool = True, on_bytes: OnBytes | None = None
) -> tuple[tuple[int, Path] | None, list[tuple[Path, list[Issue]]]]:
    """The newest undamaged checkpoint as (step, folder), or None, and the damaged ones that are
    newer, each with its issues. saved: (step, folder) of the checkpoints, oldest first."""
    damaged: list[tuple[Path, list[Issue]]] = []
    for step, folder in reversed(saved):
        issues = find_damage(folder, hashed=hashed, on_bytes=on_bytes)
        if not issues:
            return (step, folder), damaged
        damaged.append((folder, issues))
    return None, damaged


class CheckpointDamaged(InputError):
    """The bytes of the file at `path` of a checkpoint are not those that were written. folder: the
    checkpoint."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(damage_error(path, why).issues)
        self.folder = path.parent


def damage_error(path: Path, why: str) -> InputError:
    """An error about a damaged file of a checkpoint, or about a whole checkpoint."""
    folder = path if STEP.fullmatch(path.name) else path.parent
    saved = [path for _, path in list_checkpoints(folder.parent) if (path / MANIFEST).is_file()]
    older = [path for path in saved if _is_older(path, folder)]
    hint = f"name {older[-1]}, the checkpoint before it, or remove {folder}" if older else ""
    hint = hint or f"restore {folder} from a backup; there is no checkpoint before it"
    return InputError.of("checkpoint-damaged", str(path), why, hint)


def _is_older(saved: Path, folder: Path) -> bool:
    step, other = STEP.fullmatch(saved.name), STEP.fullmatch(folder.name)
    return step is not None and other is not None and int(step[1]) < int(other[1])


def sha256(path: Path, on_bytes: OnBytes | None = None) -> str:
    """SHA-256 of a file, in hexadecimal. on_bytes: called with the number of bytes just read."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 24):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


def _first(error: ValidationError) -> str:
    """The first mistake: `parameters.head.weight.blocks: Field required`."""
    first = error.errors()[0]
    return ": ".join([*([".".join(map(str, first["loc"]))] if first["loc"] else []), first["msg"]])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise damage_error(path, error.strerror or str(error)) from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise damage_error(path, str(error)) from None
