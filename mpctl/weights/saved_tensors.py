"""The tensors of a checkpoint of ours, for whatever part of a parameter is asked for.

Each shard holds blocks of rows of some parameters (rundir/checkpoints.py). A part of a parameter is
put together from every shard that has some of it, so that any layout reads any other's checkpoint.
Shards are read and checked by shard_reader.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mpctl.families import get_table
from mpctl.kernels.parameters import Shard, single_cut
from mpctl.rundir.shards import (
    Manifest,
    ParameterPlacement,
    damage_error,
    read_manifest,
    read_shard_record,
    shard_path,
)
from mpctl.spec.model import ModelSpec
from mpctl.weights.headers import TensorHeader
from mpctl.weights.shard_reader import ShardReader


@dataclass(frozen=True)
class ShardSource:
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


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose records were read, and whose tensors can be. frozen: the parameters that
    have a value alone."""

    folder: Path
    manifest: Manifest
    sources: list[ShardSource]
    frozen: frozenset[str]

    @classmethod
    def of(cls, folder: Path) -> OpenCheckpoint:
        """The checkpoint in a folder. Raises InputError when a record is damaged."""
        manifest = read_manifest(folder)
        sources = [_open_source(folder, index) for index in range(manifest.shards)]
        frozen = frozenset[str]().union(*(source.frozen for source in sources))
        return cls(folder, manifest, sources, frozen)

    def require_names(self, model: Collection[str]) -> None:
        """Raises InputError when it has a parameter that is not in `model`."""
        for source in self.sources:
            if unknown := sorted(source.shards.keys() - set(model)):
                why = f"holds {unknown[0]}, which the model does not have"
                raise damage_error(source.path, why)

    def updates_of(self, name: str) -> int:
        """How many updates the moments of a parameter have seen."""
        counts = (source.updates[name] for source in self.sources if name in source.updates)
        return next(counts, self.manifest.updates)

    def fields(self, name: str) -> dict[str, TensorHeader]:
        """What was saved of a parameter, `value` and the moments, with a header of one of its
        tensors. Raises InputError when nothing was."""
        for source in self.sources:
            if name in source.shards:
                stored = source.reader.tensors.items()
                prefix = f"{name}/"
                return {k.removeprefix(prefix): h for k, h in stored if k.startswith(prefix)}
        raise damage_error(self.folder, f"{name} is in no shard, the model has it")

    def fill(
        self, name: str, target: Shard, tensors: dict[str, Tensor], first_optional: int | None
    ) -> None:
        """Copy the target's part of a parameter from every shard that has some of it. tensors: by
        field, `value` and the moments; first_optional: the first row that need not have been saved.
        """
        _fill(name, target, tensors, self.sources, first_optional)


def padding_rows(model: ModelSpec) -> dict[str, int]:
    """Parameters whose height depends on tp, with the first row that is vocabulary padding."""
    weights = get_table(model, tp=1).weights()
    return {weight.name: model.vocab for weight in weights if weight.dims[0] == "vocab"}


def _open_source(folder: Path, index: int) -> ShardSource:
    record = read_shard_record(folder, index, hashed=False)
    parameters = record.parameters
    shards = {name: _shard_of(p) for name, p in parameters.items()}
    updates = {name: p.updates for name, p in parameters.items() if p.updates is not None}
    reader = ShardReader(shard_path(folder, index), record)
    return ShardSource(reader, shards, frozenset(record.frozen), updates)


def _shard_of(placement: ParameterPlacement) -> Shard:
    blocks = tuple(range(*block) for block in placement.blocks)
    return Shard(tuple(placement.shape), {} if placement.dim is None else {placement.dim: blocks})


def _fill(
    name: str,
    target: Shard,
    tensors: dict[str, Tensor],
    sources: list[ShardSource],
    first_optional: int | None,
) -> None:
    """Copy the target's part of a parameter from every source that holds some of it. tensors: by
    field, `value` and the moments; first_optional: the first row that need not have been saved."""
    covered, owners = 0, [source for source in sources if name in source.shards]
    if not owners:
        raise damage_error(sources[0].path.parent, f"{name} is in no shard, the model has it")
    dim, blocks = single_cut(target)
    for source in owners:
        saved = source.shards[name]
        if not _fits(saved, target, is_padded=first_optional is not None):
            raise damage_error(
                source.path, f"{name}: holds {saved.shape}, the model needs {target.shape}"
            )
        if dim is None:
            _copy(source.reader, name, [(slice(None), slice(None))], dim, tensors)
            return
        covered += _copy(source.reader, name, list(overlaps(saved, target)), dim, tensors)
    needed = sum(
        max(0, min(b.stop, b.stop if first_optional is None else first_optional) - b.start)
        for b in blocks
    )
    if covered < needed:
        raise damage_error(sources[0].path.parent, f"{name}: {needed - covered} rows are missing")


def _fits(saved: Shard, target: Shard, *, is_padded: bool) -> bool:
    """Whether both are parts of one parameter, whose height along `dim` padding may change."""
    dim = single_cut(target)[0]
    free = dim if is_padded else None
    sizes = enumerate(zip(saved.shape, target.shape, strict=False))
    same = all(a == b or d == free for d, (a, b) in sizes)
    return same and single_cut(saved)[0] == dim and len(saved.shape) == len(target.shape)


def overlaps(source: Shard, target: Shard) -> Iterator[tuple[slice, slice]]:
    """Pairs of local slices (in `source`, in `target`) of the same elements along the split
    dimension.

    >>> a, b = Shard((8,), {0: (range(0, 4),)}), Shard((8,), {0: (range(2, 8),)})
    >>> list(overlaps(a, b))
    [(slice(2, 4, None), slice(0, 2, None))]
    """
    source_offset = 0
    for theirs in single_cut(source)[1]:
        target_offset = 0
        for ours in single_cut(target)[1]:
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
