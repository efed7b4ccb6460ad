"""Checkpoints that any layout can read: shards in safetensors, each knowing its place in the whole.

RUN/checkpoints/step-N/ holds one `shard-K.safetensors` a tensor-parallel rank of a pipeline stage
(value and AdamW's moments of its parameters; K = stage tp + rank), `shard-K.json` beside it (of
each parameter its full shape, split dimension, blocks kept and updates; bytes and sha256 of the
file), `manifest.json`, and copies of the run's job.json and plan.json. Replicas save nothing, nor
does a stage what one before it holds too; the slices of ZeRO are gathered to the one that writes:
a file does not tell the ZeRO stage. Here it is read; saving.py writes it.

How many updates a parameter has seen is AdamW's step, on which its bias correction depends. It is
kept by parameter, since one that was frozen at first has seen fewer than the others.

Files are hashed by whoever starts the ranks, once (launch/resume.py); the ranks compare sizes.

A frozen parameter has no moments: its value is saved alone, in its own dtype, to the bit, and the
record names it under `frozen`. A run that trains it reads the value and starts its moments at 0; a
run that freezes what was trained reads the value alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpctl.kernels.parameters import Shard, shard_of
from mpctl.rundir.shards import Manifest, damage_error, read_manifest, read_shard_record, shard_path
from mpctl.runtime.optimizer import Optimizer


@dataclass(frozen=True)
class _Source:
    """One file of a checkpoint and what it holds; frozen: parameters of which it has the value
    alone; updates: what the moments of a parameter have seen, where the file tells."""

    path: Path
    places: dict[str, Shard]
    frozen: frozenset[str]
    updates: dict[str, int] = field(default_factory=dict)


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
    record = read_shard_record(folder, index, hashed=False)
    parameters = record.parameters
    places = {
        name: Shard(tuple(p.shape), p.dim, tuple(range(*block) for block in p.blocks))
        for name, p in parameters.items()
    }
    updates = {name: p.updates for name, p in parameters.items() if p.updates is not None}
    return _Source(shard_path(folder, index), places, frozenset(record.frozen), updates)


def _fill(
    name: str, target: Shard, tensors: dict[str, Tensor], sources: list[_Source],
    first_optional: int | None,
) -> None:  # fmt: skip
    covered, owners = 0, [source for source in sources if name in source.places]
    if not owners:
        raise damage_error(sources[0].path.parent, f"{name} is in no shard, the model has it")
    for source in owners:
        held = source.places[name]
        if not _fits(held, target, is_padded=first_optional is not None):
            raise damage_error(
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
        raise damage_error(sources[0].path.parent, f"{name}: {needed - covered} rows are missing")


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
    except (SafetensorError, OSError, RuntimeError, IndexError, ValueError) as error:
        raise damage_error(path, f"{name}: {error}") from None
    return sum(to.stop - to.start for _, to in copies if to.stop is not None)
