"""Checkpoints that any layout can read: shards in safetensors, each knowing its place in the whole.

RUN/checkpoints/step-N/ holds one `shard-K.safetensors` a tensor-parallel rank of a pipeline stage
(value and AdamW's moments of its parameters; K = stage tp + rank), `shard-K.json` beside it (full
shape, split dimension, blocks kept, bytes and sha256 of the file), and `manifest.json`. It is
assembled under a temporary name and renamed when whole, so that dying while saving never costs the
previous one. Replicas save nothing, nor does a stage what one before it holds too; the slices of
ZeRO are gathered to the one that writes, so that a file does not tell the ZeRO stage.

A frozen parameter has no moments: its value is saved alone, in its own dtype, to the bit, and the
record names it under `frozen`. A run that trains it reads the value and starts its moments at 0; a
run that freezes what was trained reads the value alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mpctl.kernels.parameters import Shard, shard_of
from mpctl.runtime.loss_scale import LossScale
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.optimizer import Optimizer
from mpctl.runtime.process import write_json
from mpctl.shards import (
    MANIFEST,
    SCHEMA,
    Manifest,
    damaged,
    read_manifest,
    read_shard_record,
    sha256,
    shard_path,
)


def save(
    root: Path, step: int, names: dict[Tensor, str], optimizer: Optimizer, mesh: Mesh, *,
    scale: LossScale | None = None,
) -> Path:  # fmt: skip
    """Write `step-N` after `step` steps; every rank calls it and returns when it is whole.

    names: of the parameters that this rank's shard is to hold. scale: of the loss, in fp16.
    """
    partial = root / f".step-{step}.partial"
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(mesh)
    held = _held(names, optimizer, is_kept=mesh.is_model_writer)
    if mesh.is_model_writer:
        _save_shard(partial, mesh.pp.rank * mesh.tp.size + mesh.tp.rank, names, held)
    _barrier(mesh)
    if mesh.rank == 0:
        tp, stages = mesh.tp.size, mesh.pp.size
        manifest = {"schema": SCHEMA, "step": step, "shards": tp * stages, "tp": tp}
        if scale is not None:
            manifest["loss_scale"] = scale.state()
        write_json(partial / MANIFEST, manifest)
        _publish(partial, root / f"step-{step}")
    _barrier(mesh)
    return root / f"step-{step}"


def _publish(partial: Path, final: Path) -> None:
    """Rename a whole checkpoint into place; one of the same step goes only after that."""
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _barrier(mesh: Mesh) -> None:
    mesh.world.all_reduce(torch.zeros(1, device=mesh.device))


State = dict[str, Tensor]


def _held(names: dict[Tensor, str], optimizer: Optimizer, *, is_kept: bool) -> dict[Tensor, State]:
    """What a shard holds of each parameter, the frozen ones last; of slices the replicas gather it
    bucket by bucket, and only who writes keeps it."""
    found: dict[Tensor, State] = {}
    for parameter, state in optimizer.states():
        if is_kept and parameter in names:
            found[parameter] = {field: _alone(tensor) for field, tensor in state.items()}
    frozen: dict[Tensor, Tensor] = dict(optimizer.frozen_values())
    for other in names if is_kept else ():
        if other not in optimizer.trained:
            found[other] = {"value": _alone(frozen.get(other, other).detach())}
    return found


def _alone(tensor: Tensor) -> Tensor:
    """Without the rest of the bucket that it may lie in, whose memory would be kept."""
    is_view = tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.to("cpu", copy=True) if is_view else tensor.contiguous()


def _save_shard(
    folder: Path, index: int, names: dict[Tensor, str], held: dict[Tensor, State]
) -> None:
    tensors: State = {}
    places = {}
    for parameter, state in held.items():
        name, shard = names[parameter], shard_of(parameter)
        tensors |= {f"{name}/{field}": tensor for field, tensor in state.items()}
        blocks = [[block.start, block.stop] for block in shard.blocks]
        places[name] = {"shape": list(shard.shape), "dim": shard.dim, "blocks": blocks}
    path = shard_path(folder, index)
    save_file(tensors, path)
    record = {"bytes": path.stat().st_size, "sha256": sha256(path), "parameters": places}
    frozen = [names[parameter] for parameter, state in held.items() if state.keys() == {"value"}]
    if frozen:
        record["frozen"] = frozen
    write_json(path.with_suffix(".json"), record)


@dataclass(frozen=True)
class _Source:
    """One file of a checkpoint and what it holds; frozen: of these, the value alone."""

    path: Path
    places: dict[str, Shard]
    frozen: frozenset[str]


def load(
    folder: Path, names: dict[Tensor, str], optimizer: Optimizer, *, model: Collection[str],
    may_lack: dict[str, int],
) -> Manifest:  # fmt: skip
    """Fill values and the optimizer's moments from a checkpoint of any layout; returns what it
    says of itself.

    names: of all parameters here, the frozen ones too; model: those of every stage. may_lack: by
    parameter, the first row that a checkpoint need not hold (vocabulary padding, whose height
    depends on tp). Raises InputError naming file and tensor.
    """
    manifest = read_manifest(folder)
    sources = [_open_source(folder, index) for index in range(manifest.shards)]
    for source in sources:
        if unknown := sorted(source.places.keys() - set(model)):
            raise damaged(source.path, f"holds {unknown[0]}, which the model does not have")
    frozen_then = frozenset[str]().union(*(source.frozen for source in sources))
    for parameter, tensors in optimizer.states():
        name = names[parameter]
        tensors["value"] = tensors["value"].clone()
        if name in frozen_then:
            tensors = {"value": tensors["value"]}
        _fill(name, shard_of(parameter), tensors, sources, may_lack.get(name))
        optimizer.load(parameter, tensors, updates=manifest.updates)
    optimizer.publish()
    for frozen, name in names.items():
        if frozen not in optimizer.trained:
            value = optimizer.value_of(frozen).detach()
            _fill(name, shard_of(frozen), {"value": value}, sources, may_lack.get(name))
            optimizer.keep(frozen, value)
    return manifest


@torch.no_grad()
def load_values(
    folder: Path, targets: dict[str, tuple[Shard, Tensor]], *, may_lack: dict[str, int]
) -> None:
    """Fill tensors, by name with the part each keeps, from the values in a checkpoint of any
    layout; moments and step count stay behind. Padding that was not saved becomes zeros."""
    sources = [_open_source(folder, index) for index in range(read_manifest(folder).shards)]
    for name, (shard, tensor) in targets.items():
        if name in may_lack:
            tensor.zero_()
        _fill(name, shard, {"value": tensor}, sources, may_lack.get(name))


def _open_source(folder: Path, index: int) -> _Source:
    record = read_shard_record(folder, index)
    places = {
        name: Shard(tuple(p["shape"]), p["dim"], tuple(range(*block) for block in p["blocks"]))
        for name, p in record["parameters"].items()
    }
    return _Source(shard_path(folder, index), places, frozenset(record.get("frozen", ())))


def _fill(
    name: str, target: Shard, tensors: dict[str, Tensor], sources: list[_Source],
    first_optional: int | None,
) -> None:  # fmt: skip
    covered, owners = 0, [source for source in sources if name in source.places]
    if not owners:
        raise damaged(sources[0].path.parent, f"{name} is in no shard, the model has it")
    for source in owners:
        held = source.places[name]
        if not _fits(held, target, is_padded=first_optional is not None):
            raise damaged(
                source.path, f"{name}: holds {held.shape}, the model needs {target.shape}"
            )
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
        raise damaged(sources[0].path.parent, f"{name}: {needed - covered} rows are missing")


def _fits(held: Shard, target: Shard, *, is_padded: bool) -> bool:
    """Whether both are parts of one parameter, whose height along `dim` padding may change."""
    free = target.dim if is_padded else None
    sizes = enumerate(zip(held.shape, target.shape, strict=False))
    same = all(a == b or d == free for d, (a, b) in sizes)
    return same and held.dim == target.dim and len(held.shape) == len(target.shape)


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
            for field in tensors:
                stored = file.get_slice(f"{name}/{field}")
                for at, to in copies:
                    tensors[field][(*lead, to)].copy_(stored[(*lead, at)])
    except (SafetensorError, OSError, RuntimeError) as error:
        raise damaged(path, f"{name}: {error}") from None
    return sum(to.stop - to.start for _, to in copies if to.stop is not None)
