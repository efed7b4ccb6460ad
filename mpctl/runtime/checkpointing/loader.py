"""Checkpoints that any layout can read: safetensors shards that say which part of each parameter
they hold.

RUN/checkpoints/step-N/ holds one `shard-K.safetensors` a tensor-parallel rank of a pipeline stage
(value and AdamW's moments of its parameters; K = stage tp + rank), `shard-K.json` beside it (of
each parameter its full shape, split dimension, blocks kept and updates; bytes and sha256 of the
file), `manifest.json`, and copies of the run's job.json and plan.json. Only the first
replica saves, and of a parameter that several stages hold only the first stage; ZeRO slices are
gathered before they are written, so that a file does not depend on the ZeRO stage. This module
reads checkpoints; saver.py writes them.

How many updates a parameter has seen is AdamW's step, on which its bias correction depends. It is
kept by parameter, since one that was frozen at first has seen fewer than the others.

Each rank checks what it reads while it reads it, once (weights/shard_reader.py); CheckpointDamaged
says which bytes have changed, and the launcher then uses the checkpoint before.

A frozen parameter has no moments: its value is saved alone, in its own dtype, to the bit, and the
record names it under `frozen`. A run that trains it reads the value and starts its moments at 0; a
run that freezes what was trained reads the value alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mpctl.kernels.parameters import Shard, shard_of
from mpctl.rundir.shards import Manifest, damage_error, read_manifest, read_shard_record, shard_path
from mpctl.runtime.optimizer import Optimizer
from mpctl.weights.shard_reader import ShardReader


@dataclass(frozen=True)
class _Source:
    """One file of a checkpoint. shards: the part of each parameter that it holds, by name; frozen:
    parameters of which it has the value alone; updates: how many updates the moments of a parameter
    have seen, where the file says so."""

    reader: ShardReader
    shards: dict[str, Shard]
    frozen: frozenset[str]
    updates: dict[str, int] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file."""
        return self.reader.path


def load(
    folder: Path,
    names: dict[Tensor, str],
    optimizer: Optimizer,
    *,
    model: Collection[str],
    may_lack: dict[str, int],
) -> Manifest:
    """Fill parameters and the optimizer's moments from a checkpoint of any layout; returns its
    manifest.

    names: of all parameters here, the frozen ones too; model: those of every stage. may_lack: by
    parameter, the first row that a checkpoint need not hold (vocabulary padding, whose height
    depends on tp). Raises InputError naming file and tensor.
    """
    manifest = read_manifest(folder)
    sources = [_open_source(folder, index) for index in range(manifest.shards)]
    for source in sources:
        if unknown := sorted(source.shards.keys() - set(model)):
            raise damage_error(source.path, f"holds {unknown[0]}, which the model does not have")
    frozen_then = frozenset[str]().union(*(source.frozen for source in sources))
    updates = {name: count for source in sources for name, count in source.updates.items()}
    for parameter, tensors in optimizer.states():
        name = names[parameter]
        tensors["value"] = tensors["value"].clone()
        if name in frozen_then:
            tensors = {"value": tensors["value"]}
        _fill(name, shard_of(parameter), tensors, sources, may_lack.get(name))
        optimizer.load(parameter, tensors, updates=updates.get(name, manifest.updates))
    optimizer.publish()
    for frozen, name in names.items():
        if frozen not in optimizer.trained:
            value = optimizer.full_value(frozen).detach()
            _fill(name, shard_of(frozen), {"value": value}, sources, may_lack.get(name))
            optimizer.set_value(frozen, value)
    return manifest


@torch.no_grad()
def load_values(
    folder: Path, targets: dict[str, tuple[Shard, Tensor]], *, may_lack: dict[str, int]
) -> None:
    """Fill tensors from the values in a checkpoint of any layout; moments and step count are not
    read. targets: by parameter name, the part of it to read and the tensor to fill. may_lack: as in
    `load`; vocabulary padding that was not saved becomes zeros. Raises InputError."""
    sources = [_open_source(folder, index) for index in range(read_manifest(folder).shards)]
    for name, (shard, tensor) in targets.items():
        if name in may_lack:
            tensor.zero_()
        _fill(name, shard, {"value": tensor}, sources, may_lack.get(name))


def _open_source(folder: Path, index: int) -> _Source:
    record = read_shard_record(folder, index, hashed=False)
    parameters = record.parameters
    shards = {
        name: Shard(tuple(p.shape), p.dim, tuple(range(*block) for block in p.blocks))
        for name, p in parameters.items()
    }
    updates = {name: p.updates for name, p in parameters.items() if p.updates is not None}
    reader = ShardReader(shard_path(folder, index), record)
    return _Source(reader, shards, frozenset(record.frozen), updates)


def _fill(
    name: str,
    target: Shard,
    tensors: dict[str, Tensor],
    sources: list[_Source],
    first_optional: int | None,
) -> None:
    """Copy the target's part of a parameter from every source that holds some of it. tensors: by
    field, `value` and the moments; first_optional: the first row that need not have been saved."""
    covered, owners = 0, [source for source in sources if name in source.shards]
    if not owners:
        raise damage_error(sources[0].path.parent, f"{name} is in no shard, the model has it")
    for source in owners:
        saved = source.shards[name]
        if not _fits(saved, target, is_padded=first_optional is not None):
            raise damage_error(
                source.path, f"{name}: holds {saved.shape}, the model needs {target.shape}"
            )
        if target.dim is None:
            _copy(source.reader, name, [(slice(None), slice(None))], target.dim, tensors)
            return
        covered += _copy(source.reader, name, list(overlaps(saved, target)), target.dim, tensors)
    needed = sum(
        max(0, min(b.stop, b.stop if first_optional is None else first_optional) - b.start)
        for b in target.blocks
    )
    if covered < needed:
        raise damage_error(sources[0].path.parent, f"{name}: {needed - covered} rows are missing")


def _fits(saved: Shard, target: Shard, *, is_padded: bool) -> bool:
    """Whether both are parts of one parameter, whose height along `dim` padding may change."""
    free = target.dim if is_padded else None
    sizes = enumerate(zip(saved.shape, target.shape, strict=False))
    same = all(a == b or d == free for d, (a, b) in sizes)
    return same and saved.dim == target.dim and len(saved.shape) == len(target.shape)


def overlaps(source: Shard, target: Shard) -> Iterator[tuple[slice, slice]]:
    """Pairs of local slices (in `source`, in `target`) of the same elements along the split
    dimension.

    >>> a, b = Shard((8,), 0, (range(0, 4),)), Shard((8,), 0, (range(2, 8),))
    >>> list(overlaps(a, b))
    [(slice(2, 4, None), slice(0, 2, None))]
    """
    source_offset = 0
    for theirs in source.blocks:
        target_offset = 0
        for ours in target.blocks:
            start, stop = max(theirs.start, ours.start), min(theirs.stop, ours.stop)
            if start < stop:
                a, b = start - theirs.start + source_offset, start - ours.start + target_offset
                yield slice(a, a + stop - start), slice(b, b + stop - start)
            target_offset += len(ours)
        source_offset += len(theirs)


def _copy(
    reader: ShardReader,
    name: str,
    copies: list[tuple[slice, slice]],
    dim: int | None,
    tensors: dict[str, Tensor],
) -> int:
    """Read pairs of slices (in the file, in the tensor); returns how many elements along `dim` were
    filled. Rows are read alone, columns with the tensor that they are of."""
    lead = (slice(None),) * (dim or 0)
    try:
        for field, tensor in tensors.items() if copies else ():
            if dim == 0:
                for saved, local in copies:
                    tensor[local].copy_(reader.read(f"{name}/{field}", saved))
                continue
            stored = reader.read(f"{name}/{field}")
            for saved, local in copies:
                tensor[(*lead, local)].copy_(stored[(*lead, saved)])
    except (OSError, RuntimeError, IndexError, ValueError) as error:
        raise damage_error(reader.path, f"{name}: {error}") from None
    return sum(local.stop - local.start for _, local in copies if local.stop is not None)
