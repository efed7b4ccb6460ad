"""Checkpoints that any layout can read: shards in safetensors, each knowing its place in the whole.

RUN/checkpoints/step-N/ holds one `shard-K.safetensors` a tensor-parallel rank (value and AdamW's
moments of every parameter), `shard-K.json` beside it (full shape, split dimension, blocks kept,
bytes and sha256 of the file), and `manifest.json`, written last: a directory without it is not a
checkpoint. It is assembled under a temporary name and renamed when whole, so that dying while
saving never costs the previous one. Replicas save nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mpctl.errors import InputError
from mpctl.kernels.parameters import Shard, shard_of
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.optimizer import MOMENTS, Optimizer
from mpctl.runtime.process import write_json

SCHEMA = "mpctl.checkpoint/1"
FIELDS = ("value", *MOMENTS)


def checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first."""
    found = [path.parent for path in root.glob("step-*/manifest.json")]
    steps = [(int(path.name.removeprefix("step-")), path) for path in found]
    return sorted(steps)


def save(root: Path, step: int, names: dict[Tensor, str], optimizer: Optimizer, mesh: Mesh) -> Path:
    """Write `step-N` after `step` updates; every rank calls it and returns when it is whole."""
    final, partial = root / f"step-{step}", root / f".step-{step}.partial"
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(mesh)
    if mesh.is_model_writer:
        _save_shard(partial, mesh.tp.rank, names, optimizer)
    _barrier(mesh)
    if mesh.rank == 0:
        manifest = {"schema": SCHEMA, "step": step, "shards": mesh.tp.size}
        write_json(partial / "manifest.json", manifest)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    _barrier(mesh)
    return final


def _barrier(mesh: Mesh) -> None:
    mesh.world.all_reduce(torch.zeros(1, device=mesh.device))


def _save_shard(folder: Path, index: int, names: dict[Tensor, str], optimizer: Optimizer) -> None:
    tensors, places = {}, {}
    for position, parameter in enumerate(optimizer.parameters):
        name, shard = names[parameter], shard_of(parameter)
        for field, tensor in optimizer.state(position).items():
            tensors[f"{name}/{field}"] = tensor.contiguous()
        blocks = [[block.start, block.stop] for block in shard.blocks]
        places[name] = {"shape": list(shard.shape), "dim": shard.dim, "blocks": blocks}
    path = folder / f"shard-{index}.safetensors"
    save_file(tensors, path)
    record = {"bytes": path.stat().st_size, "sha256": _sha256(path), "parameters": places}
    write_json(path.with_suffix(".json"), record)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True)
class _Source:
    """One file of a checkpoint and what it holds."""

    path: Path
    places: dict[str, Shard]


def load(
    folder: Path, names: dict[Tensor, str], optimizer: Optimizer, *, may_lack: dict[str, int]
) -> int:
    """Fill the optimizer's values and moments from a checkpoint of any layout; returns its step.

    may_lack: by parameter, the first row that a checkpoint need not hold (vocabulary padding,
    whose height depends on tp). Raises InputError naming file and tensor.
    """
    manifest = _read_json(folder / "manifest.json")
    if manifest.get("schema") != SCHEMA:
        raise _damaged(folder / "manifest.json", f"schema {manifest.get('schema')!r}")
    step = int(manifest["step"])
    sources = [_open_source(folder, index) for index in range(int(manifest["shards"]))]
    for position, parameter in enumerate(optimizer.parameters):
        name = names[parameter]
        tensors = optimizer.state(position)
        tensors["value"] = tensors["value"].clone()
        _fill(name, shard_of(parameter), tensors, sources, may_lack.get(name))
        optimizer.load(position, tensors, step=step)
    optimizer.publish()
    return step


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str) -> InputError:
    return InputError.of("checkpoint-damaged", str(path), why, "resume from an earlier checkpoint")


def _open_source(folder: Path, index: int) -> _Source:
    path = folder / f"shard-{index}.safetensors"
    record = _read_json(path.with_suffix(".json"))
    try:
        size, digest = path.stat().st_size, _sha256(path)
    except OSError as error:
        raise _damaged(path, str(error)) from None
    if size != record["bytes"]:
        raise _damaged(path, f"has {size} bytes, {record['bytes']} were written")
    if digest != record["sha256"]:
        raise _damaged(path, "its bytes are not those that were written (sha256 differs)")
    places = {
        name: Shard(tuple(p["shape"]), p["dim"], tuple(range(*block) for block in p["blocks"]))
        for name, p in record["parameters"].items()
    }
    return _Source(path, places)


def _fill(
    name: str, target: Shard, tensors: dict[str, Tensor], sources: list[_Source],
    first_optional: int | None,
) -> None:  # fmt: skip
    covered = 0
    for source in sources:
        held = source.places.get(name)
        if held is None or held.dim != target.dim or len(held.shape) != len(target.shape):
            raise _damaged(source.path, f"{name}: holds {held}, the model needs {target}")
        copies = (
            [(slice(None), slice(None))] if target.dim is None else list(overlaps(held, target))
        )
        covered += _copy(source.path, name, copies, target.dim, tensors)
        if target.dim is None:
            return
    needed = sum(
        max(0, min(b.stop, b.stop if first_optional is None else first_optional) - b.start)
        for b in target.blocks
    )
    if covered < needed:
        raise _damaged(sources[0].path.parent, f"{name}: {needed - covered} rows are missing")


def overlaps(held: Shard, target: Shard) -> Iterator[tuple[slice, slice]]:
    """Local slices (in `held`, in `target`) of the global places that both keep.

    >>> a, b = Shard((8,), 0, (range(0, 4),)), Shard((8,), 0, (range(2, 8),))
    >>> list(overlaps(a, b))
    [(slice(2, 4, None), slice(0, 2, None))]
    """
    held_offset = 0
    for theirs in held.blocks:
        offset = 0
        for ours in target.blocks:
            start, stop = max(theirs.start, ours.start), min(theirs.stop, ours.stop)
            if start < stop:
                at, to = start - theirs.start + held_offset, start - ours.start + offset
                yield slice(at, at + stop - start), slice(to, to + stop - start)
            offset += len(ours)
        held_offset += len(theirs)


def _copy(
    path: Path, name: str, copies: list[tuple[slice, slice]], dim: int | None,
    tensors: dict[str, Tensor],
) -> int:  # fmt: skip
    """Read just the slices wanted; returns how many places along `dim` were filled."""
    lead = (slice(None),) * (dim or 0)
    try:
        with safe_open(path, framework="pt") as file:
            for field in FIELDS:
                stored = file.get_slice(f"{name}/{field}")
                for at, to in copies:
                    tensors[field][(*lead, to)].copy_(stored[(*lead, at)])
    except (SafetensorError, OSError, RuntimeError) as error:
        raise _damaged(path, f"{name}: {error}") from None
    return sum(to.stop - to.start for _, to in copies if to.stop is not None)
