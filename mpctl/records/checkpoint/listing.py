"""The documents of `mpctl checkpoint`: which checkpoints a run or an import has, what is in one,
whether its bytes are those that were written. Schema mpctl.checkpoints/1. No tensor is opened here;
only verify reads complete files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError
from mpctl.core.tensor_grid import TensorGrid, grid_axes
from mpctl.records.checkpoint.folder import checkpoints_at
from mpctl.records.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    OnBytes,
    ShardFile,
    ShardRecord,
    read_manifest,
    read_shard_record,
)
from mpctl.records.checkpoint.verify import Progress, checkpoint_bytes, counted, find_damage
from mpctl.spec.load import load_job


class CheckpointEntry(TypedDict):
    """One checkpoint. tp, pp, ep, etp: of the layout that wrote it, None where its manifest cannot
    be read; tensor_mode, tensor_depth: those of the run's job, None if they do not describe its
    cuts; bytes: of all shards; written: ISO 8601 in UTC; problems: what is wrong with it; verified:
    whether every byte was compared, or only records and sizes; seconds: that it took."""

    step: int
    path: str
    tp: int | None
    pp: int | None
    ep: int | None
    etp: int | None
    tensor_mode: str | None
    tensor_depth: int | None
    bytes: int
    written: str | None
    problems: list[str]
    verified: bool
    seconds: float


class CheckpointsDocument(TypedDict):
    """Output of `mpctl checkpoint list` and `verify` with --json. set_aside: renamed folders of
    damaged checkpoints."""

    schema: Literal["mpctl.checkpoints/1"]
    path: str
    checkpoints: list[CheckpointEntry]
    set_aside: list[str]


class ShardRow(TypedDict):
    """One shard: its ranks of tp and pp, bytes of its file, parameters in it and frozen ones among
    them; block_checksums: whether a reader can check a part of it."""

    index: int
    tp: int
    pp: int
    bytes: int
    parameters: int
    frozen: int
    block_checksums: bool


class ParameterRow(TypedDict):
    """One parameter: its full shape, the dimensions that are split over tp, the shards that have a
    part of it, whether it is frozen and how many updates its moments have seen."""

    name: str
    shape: list[int]
    dims: list[int]
    shards: list[int]
    frozen: bool
    updates: int | None


class InspectDocument(TypedDict):
    """Output of `mpctl checkpoint inspect` with --json. elements: of all parameters; loss_scale: of
    fp16, empty for other types."""

    schema: Literal["mpctl.checkpoint-inspect/1"]
    checkpoint: CheckpointEntry
    elements: int
    loss_scale: dict[str, float]
    shards: list[ShardRow]
    parameters: list[ParameterRow]


@dataclass(frozen=True)
class CheckpointPath:
    """The checkpoints that a path on the command line names. root: their folder; saved: (step,
    folder) of each, oldest first: one, or all of a run."""

    root: Path
    saved: tuple[tuple[int, Path], ...]

    @property
    def newest(self) -> Path:
        return self.saved[-1][1]

    def only_newest(self) -> CheckpointPath:
        return CheckpointPath(self.root, self.saved[-1:])


def find_checkpoints(path: Path) -> CheckpointPath:
    """The checkpoint at a path, or those of the run or the import there. Raises InputError when
    there is none."""
    saved = checkpoints_at(path)
    if not saved:
        message = f"{path} has no checkpoint"
        hint = "name a run, RUN/checkpoints/step-N, or what `mpctl checkpoint import` wrote"
        raise InputError.of("no-checkpoint", "RUN", message, hint)
    return CheckpointPath(saved[0][1].parent, tuple(saved))


def list_document(found: CheckpointPath) -> CheckpointsDocument:
    """All checkpoints, checked by records and sizes."""
    return _document(found, [describe(step, folder) for step, folder in found.saved])


def verify_document(found: CheckpointPath, on_progress: Progress) -> CheckpointsDocument:
    """These checkpoints with each byte compared: about a second a GB."""
    total = sum(checkpoint_bytes(folder) for _, folder in found.saved)
    on_bytes = counted("verify", total, on_progress)
    return _document(found, [describe(step, folder, hashed=True, on_bytes=on_bytes) for step, folder in found.saved])


def describe(step: int, folder: Path, *, hashed: bool = False, on_bytes: OnBytes | None = None) -> CheckpointEntry:
    """One checkpoint; never raises for its content."""
    began = time.perf_counter()
    issues = find_damage(folder, hashed=hashed, on_bytes=on_bytes)
    manifest, written, grid = None, None, None
    with suppress(InputError, OSError):
        manifest = read_manifest(folder)
        modified = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime, UTC)
        written = modified.isoformat(timespec="seconds")
        grid = _grid(folder, manifest)
    return {
        "step": step,
        "path": str(folder),
        "tp": manifest.size("tp") if manifest else None,
        "pp": manifest.size("pp") if manifest else None,
        "ep": manifest.size("ep") if manifest else None,
        "etp": manifest.size("etp") if manifest else None,
        "tensor_mode": grid.mode if grid else None,
        "tensor_depth": grid.axes.get("depth") if grid else None,
        "bytes": checkpoint_bytes(folder),
        "written": written,
        "problems": [f"{issue.where}: {issue.message}" for issue in issues],
        "verified": hashed,
        "seconds": time.perf_counter() - began,
    }


def _grid(folder: Path, manifest: Manifest) -> TensorGrid | None:
    """The grid of tp ranks of the run's job, where it is what cut this checkpoint: a resumed run
    may have had another before. 2d on 4 ranks cuts both sides of a matrix, 1d one."""
    tp = manifest.size("tp")
    try:
        job = load_job(str(folder.parent.parent / "job.json"))
    except InputError:
        return None
    if job.parallel.tp != tp:
        return None
    axes = grid_axes(job.parallel.tensor_mode, tp, job.parallel.tensor_depth)
    if axes is None:
        return None
    grid = TensorGrid(job.parallel.tensor_mode, axes)
    planned = sorted(map(grid.parts, grid.weight_axes(("vocab", "hidden"))))
    first = read_shard_record(folder, manifest.shards[0], hashed=False)
    shards = [part.shard for part in first.parameters.values()]
    cuts = [
        sorted(full // own for full, own in zip(shard.shape, shard.local_shape, strict=True) if own)
        for shard in shards
        if len(shard.cuts) == 2
    ]
    return grid if (planned in cuts if grid.mode != "1d" else not cuts) else None


def inspect_document(found: CheckpointPath) -> InspectDocument:
    """Describe a checkpoint from its manifest and records. Raises InputError when one of them is
    damaged."""
    folder, step = found.newest, found.saved[-1][0]
    manifest = read_manifest(folder)
    records = [(shard, read_shard_record(folder, shard, hashed=False)) for shard in manifest.shards]
    parameters = _parameters(records)
    return {
        "schema": "mpctl.checkpoint-inspect/1",
        "checkpoint": describe(step, folder),
        "elements": sum(prod(row["shape"]) for row in parameters),
        "loss_scale": manifest.loss_scale,
        "shards": [_shard_row(shard, record) for shard, record in records],
        "parameters": parameters,
    }


def _document(found: CheckpointPath, entries: list[CheckpointEntry]) -> CheckpointsDocument:
    set_aside = sorted(str(path) for path in found.root.glob("damaged-*"))
    return {"schema": "mpctl.checkpoints/1", "path": str(found.root), "checkpoints": entries, "set_aside": set_aside}


def _shard_row(shard: ShardFile, record: ShardRecord) -> ShardRow:
    return {
        "index": shard.index,
        "tp": shard.coords.get("tp", 0),
        "pp": shard.stage,
        "bytes": record.bytes,
        "parameters": len(record.parameters),
        "frozen": len(record.frozen),
        "block_checksums": record.checksums is not None,
    }


def _parameters(records: Sequence[tuple[ShardFile, ShardRecord]]) -> list[ParameterRow]:
    """Each parameter once, in the order of the shards."""
    rows: dict[str, ParameterRow] = {}
    for shard, record in records:
        for name, part in record.parameters.items():
            row = rows.setdefault(
                name,
                {
                    "name": name,
                    "shape": list(part.shape),
                    "dims": sorted(part.shard.cuts),
                    "shards": [],
                    "frozen": name in record.frozen,
                    "updates": part.updates,
                },
            )
            row["shards"].append(shard.index)
    return list(rows.values())
