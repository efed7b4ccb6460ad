"""Reading a checkpoint, whatever layout wrote it: parameters and the optimizer's state of a rank.

Each shard holds a part of some parameters, cut along any dimensions (mpctl/core/shard.py). A part of a
parameter is assembled box by box from the shards that have some of it; a box that several have is
read from the first of them. A [4, 4] weight saved by rows over tp 2, read by the rank of a 2 x 2
grid that keeps rows 2 and 3 and columns 0 and 1: rows 0 and 1 of the second shard, of which it
copies two columns.

How many updates a parameter has seen is AdamW's step, on which its bias correction depends. It is
stored by parameter, since one that was frozen at first has seen fewer than the others.

A parameter that no optimizer steps, because it is frozen, has no moments: only its value is saved,
in its dtype, and the record names it under `frozen`. A run that trains it, or that has another
optimizer, reads the value and starts its moments at 0; a run that freezes a trained parameter reads
only the value. Buffers that no gradient moves are saved and read in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpctl.core.shard import Box, Coverage, Shard, meetings, numel
from mpctl.model.families import get_table
from mpctl.records.checkpoint.manifest import Manifest, damage_error, read_manifest, read_shard_record
from mpctl.records.checkpoint.tensor_header import TensorHeader
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.model import ModelSpec
from mpctl.train.checkpoint.snapshot import MOMENTS, OptimizerState
from mpctl.train.checkpoint.tensor_file import DTYPES, ShardReader
from mpctl.train.layers.parameters import shard_of

Targets = dict[str, tuple[Shard, Tensor]]
"""By our parameter's name: the part of it that this rank holds, and the tensor to fill with it."""
ReadTargets = Callable[[Targets], None]


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose records were read, and whose tensors can be. frozen: the parameters that
    have only a value."""

    folder: Path
    manifest: Manifest
    shards: list[ShardReader]
    frozen: frozenset[str]

    @classmethod
    def of(cls, folder: Path) -> OpenCheckpoint:
        manifest = read_manifest(folder)
        shards = [
            ShardReader(shard.path(folder), read_shard_record(folder, shard, hashed=False)) for shard in manifest.shards
        ]
        frozen = frozenset(name for shard in shards for name in shard.record.frozen)
        return cls(folder, manifest, shards, frozen)

    @property
    def names(self) -> set[str]:
        """The parameters that some shard holds."""
        return {name for shard in self.shards for name in shard.record.parameters}

    def require_names(self, model: Collection[str]) -> None:
        """Raises InputError when it has a parameter that is not in `model`."""
        for shard in self.shards:
            if unknown := sorted(shard.record.parameters.keys() - set(model)):
                why = f"holds {unknown[0]}, which the model does not have"
                raise damage_error(shard.path, why)

    def updates_of(self, name: str) -> int:
        parts = (shard.record.parameters.get(name) for shard in self.shards)
        counts = (part.updates for part in parts if part and part.updates is not None)
        return next(counts, self.manifest.updates)

    def fields(self, name: str) -> dict[str, TensorHeader]:
        """The saved fields of a parameter, `value` and the moments, with a header of one of its
        tensors. Raises InputError when there are none."""
        stored, prefix = self._owners(name)[0].tensors, f"{name}/"
        return {k.removeprefix(prefix): h for k, h in stored.items() if k.startswith(prefix)}

    def has_other_moments(self, name: str, fields: Collection[str]) -> bool:
        """Whether a parameter was saved by another optimizer, so that moments start at 0; `fields`: of
        this one's."""
        saved = self.fields(name).keys() - {"value"}
        is_whole = saved in (set(), *map(set, MOMENTS.values()))
        return is_whole and saved != set(fields) - {"value"}

    def fill(self, name: str, target: Shard, tensors: dict[str, Tensor], first_optional: int | None) -> None:
        """Copy the target's part of a parameter from every shard that has some of it. tensors: by
        field, `value` and the moments; first_optional: the first row that need not have been saved.
        """
        shared = []
        first = 0 if first_optional is None else 1  # rows may be padded to another number
        for shard in self._owners(name):
            saved = shard.record.parameters[name].shard
            has_dims = len(saved.shape) == len(target.shape)
            if not has_dims or saved.shape[first:] != target.shape[first:]:
                why = f"{name}: holds {saved.shape}, the model needs {target.shape}"
                raise damage_error(shard.path, why)
            shared += [(shard, box) for box in meetings(saved, target)]
        coverage = Coverage(target, [box for _, box in shared])
        for shard, box in shared:
            if coverage.add(box):
                _copy(shard, name, target, box, tensors)
        if lacking := sum(_required(box, first_optional) for box in coverage.missing):
            raise damage_error(self.folder, f"{name}: {lacking:,} of its elements are in no shard")

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._owners(name)[0].record.parameters[name].shard.shape

    def part(self, name: str, field: str, target: Shard, first_optional: int | None = None) -> Tensor:
        """The target's part of a parameter's value or of one of its moments, as it was saved; zeros
        for rows that need not have been saved."""
        header = self._owners(name)[0].header(f"{name}/{field}")
        tensor = torch.zeros(target.local_shape, dtype=DTYPES[header.dtype])
        self.fill(name, target, {field: tensor}, first_optional)
        return tensor

    def _owners(self, name: str) -> list[ShardReader]:
        """The files that have some of a parameter. Raises InputError when there is none."""
        if owners := [shard for shard in self.shards if name in shard.record.parameters]:
            return owners
        raise damage_error(self.folder, f"{name} is in no shard, the model has it")


def load_checkpoint(
    folder: Path,
    names: dict[Tensor, str],
    optimizer: OptimizerState,
    *,
    model: Collection[str],
    may_lack: dict[str, int],
    read_base: ReadTargets | None = None,
) -> Manifest:
    """Fill parameters and the optimizer's moments from a checkpoint of any layout; returns its
    manifest.

    names: of all parameters here, the frozen ones and buffers too; model: those of every stage.
    may_lack: by parameter, the first row that a checkpoint need not hold (vocabulary padding, whose
    height depends on tp). read_base: reads frozen parameters that a checkpoint of adapters leaves to
    their base. Raises InputError naming file and tensor.
    """
    checkpoint = OpenCheckpoint.of(folder)
    checkpoint.require_names(model)
    held = checkpoint.names
    for parameter, tensors in optimizer.states():
        name = names[parameter]
        tensors["value"] = tensors["value"].clone()
        if name in checkpoint.frozen or checkpoint.has_other_moments(name, tensors):
            tensors = {"value": tensors["value"]}
        checkpoint.fill(name, shard_of(parameter), tensors, may_lack.get(name))
        optimizer.load(parameter, tensors, updates=checkpoint.updates_of(name))
    optimizer.publish()
    for frozen, name in names.items():
        if frozen not in optimizer.trained:
            value = optimizer.full_value(frozen).detach()
            if checkpoint.manifest.base is not None and read_base is not None and name not in held:
                read_base({name: (shard_of(frozen), value)})
            else:
                checkpoint.fill(name, shard_of(frozen), {"value": value}, may_lack.get(name))
            optimizer.set_value(frozen, value)
    return checkpoint.manifest


def padding_rows(model: ModelSpec, adapter: AdapterSpec | None = None) -> dict[str, int]:
    """Return the first row of vocabulary padding of each parameter with a height that depends on tp."""
    weights = get_table(model, tp=1, adapter=adapter).weights()
    return {weight.name: model.vocab for weight in weights if weight.dims[0] == "vocab"}


def _required(box: Box, first_optional: int | None) -> int:
    """Count the elements of a box that must have been saved: those in rows before `first_optional`."""
    if first_optional is None:
        return numel(box)
    return numel((range(box[0].start, min(box[0].stop, first_optional)), *box[1:]))


def _copy(reader: ShardReader, name: str, target: Shard, box: Box, tensors: dict[str, Tensor]) -> None:
    """Fill a box of the target's tensors from a file that has it. Only the rows of a box are read,
    all of their columns."""
    saved = reader.record.parameters[name].shard
    at, to = saved.slices(box), target.slices(box)
    try:
        for field, tensor in tensors.items():
            stored = f"{name}/{field}"
            if (shape := reader.header(stored).shape) != saved.local_shape:
                raise ValueError(f"is {shape}, but its record says {saved.local_shape}")
            rows = reader.read(stored, at[0] if at else None)
            tensor[to].copy_(rows[(slice(None), *at[1:])] if at else rows)
    except (OSError, RuntimeError, IndexError, ValueError) as error:
        raise damage_error(reader.path, f"{name}: {error}") from None
