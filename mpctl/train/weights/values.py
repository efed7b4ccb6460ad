"""Values of a model's parameters at an origin: its own, those of the base that its adapters add to, and both merged.

A checkpoint of adapters alone names its base and a digest of the base's values (records/checkpoint/manifest.py). The
digest is of the middle row of every parameter, rounded to bfloat16: a copy in another layout, format or precision has
the same one, a base trained on has not.

Merged, W + s B A is computed in float32, in float64 where W is float64, and rounded once. DoRA's rows (arXiv
2402.09353, equation 5) then get their length: m (W + s B A) / |W + s B A|.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.core.shard import Shard
from mpctl.model.families import get_table
from mpctl.model.operators.adapters import MAGNITUDE, adapter_name, output_rows, targets_of
from mpctl.records.checkpoint.manifest import BaseReference, RouterBias, read_manifest
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.records.checkpoint.tensor_header import FP8
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.model import ModelSpec
from mpctl.train.checkpoint.reader import OpenCheckpoint, Targets, padding_rows
from mpctl.train.checkpoint.tensor_file import DTYPES
from mpctl.train.weights.hub import Hub
from mpctl.train.weights.origin import differences, open_base
from mpctl.train.weights.reader import fill, router_biases


@dataclass(frozen=True)
class Values:
    """Values at an origin. checkpoint: its own tensors, None of a Hugging Face directory; base: of the parameters that
    it does not hold."""

    origin: Hub | SavedModel
    checkpoint: OpenCheckpoint | None = None
    base: Values | None = None
    last: dict[str, Tensor] = field(default_factory=dict)
    """The weight that was merged last, of which an export asks for many parts."""

    @classmethod
    def of(cls, origin: Hub | SavedModel) -> Values:
        """Open an origin with its base. Raises InputError where the base is another one."""
        if isinstance(origin, Hub):
            return cls(origin)
        base = None if origin.base is None else base_values(origin.checkpoint, origin.model, origin.base)
        return cls(origin, OpenCheckpoint.of(origin.checkpoint), base)

    @property
    def model(self) -> ModelSpec:
        """The model that it has values of."""
        return self.origin.model

    @property
    def adapter(self) -> AdapterSpec | None:
        """By which it was trained, None without adapters."""
        return self.origin.adapter if isinstance(self.origin, SavedModel) else None

    def dtype(self, name: str) -> str:
        """The stored type of a parameter, in safetensors' words."""
        if isinstance(self.origin, Hub):
            return widest(self.origin.tensors[piece.name].dtype for piece in self.origin.rows[name].pieces)
        if self.base is not None and name not in self._own:
            return self.base.dtype(name)
        assert self.checkpoint is not None
        return self.checkpoint.fields(name)["value"].dtype

    def read(self, targets: Targets) -> None:
        """Fill each target, by its parameter's name, with its part of the stored value."""
        if isinstance(self.origin, Hub):
            fill(self.origin, targets)
            return
        assert self.checkpoint is not None
        if self.base is not None:
            self.base.read({name: target for name, target in targets.items() if name not in self._own})
            targets = {name: target for name, target in targets.items() if name in self._own}
        for name, (shard, tensor) in targets.items():
            if name in self._optional:
                tensor.zero_()
            self.checkpoint.fill(name, shard, {"value": tensor}, self._optional.get(name))

    def read_merged(self, targets: Targets) -> None:
        """As `read`, with the adapters of each product added to its weight."""
        self.read({name: target for name, target in targets.items() if name not in self.adapted})
        for name, (shard, tensor) in targets.items():
            if name in self.adapted:
                merged = self.merged(name)
                for box in shard.boxes():
                    part = merged[tuple(slice(span.start, span.stop) for span in box)]
                    tensor[shard.slices(box)].copy_(part)

    def part(self, name: str, shard: Shard, *, merged: bool = False) -> Tensor:
        """Part of a parameter in its stored type."""
        tensor = torch.zeros(shard.local_shape, dtype=DTYPES[self.dtype(name)])
        (self.read_merged if merged else self.read)({name: (shard, tensor)})
        return tensor

    @torch.no_grad()
    def merged(self, name: str) -> Tensor:
        """An adapted weight with its adapters, in float32 or float64."""
        if name not in self.last:
            self.last.clear()
            self.last[name] = self._merge(name)
        return self.last[name]

    def _merge(self, name: str) -> Tensor:
        assert self.adapter is not None
        shape = self._shapes[name]
        weight = self.part(name, Shard(shape))
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        matrix = weight.view(shape[0], -1, shape[-1]) if len(shape) > 2 else weight  # [E, 2, f, h] -> [E, 2f, h]
        for adapter, rows in self.adapted[name].items():
            down, up = (self.factor(f"{adapter}.{factor}.weight").to(matrix.dtype) for factor in "AB")
            part = matrix[..., rows.start : rows.stop, :]
            part += self.adapter.scale * (up @ down)[..., : part.shape[-2], :]
            if self.adapter.kind == "dora":
                length = self.factor(f"{adapter}.{MAGNITUDE}").to(matrix.dtype)
                part *= (length / torch.linalg.vector_norm(part, dim=-1)).unsqueeze(-1)
        return weight

    def factor(self, name: str) -> Tensor:
        """All of a parameter of an adapter, padding of the vocabulary included; experts' fused B as [E, 2f, r]."""
        assert self.checkpoint is not None
        found = self.part(name, Shard(self.checkpoint.shape_of(name)))
        return found.flatten(1, 2) if found.dim() > 3 else found

    @cached_property
    def adapted(self) -> dict[str, dict[str, range]]:
        """The weights with adapters: the rows of each adapter, by its name."""
        if self.adapter is None:
            return {}
        return {f"{owner}.weight": rows for owner, rows in adapters_of(self.model, self.adapter)}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shapes of the model's weights without padding."""
        return {w.name: unpadded(w.shape, w.dims, self.model) for w in get_table(self.model, tp=1).weights()}

    @cached_property
    def _own(self) -> set[str]:
        return set() if self.checkpoint is None else self.checkpoint.names

    @cached_property
    def _optional(self) -> dict[str, int]:
        return padding_rows(self.model, self.adapter)

    @torch.no_grad()
    def digest(self) -> str:
        """SHA-256 of the middle row of each parameter in bfloat16, in hexadecimal."""
        found = hashlib.sha256()
        for name, shape in sorted(self._shapes.items()):
            is_vector = len(shape) == 1
            middle = {dim: (range(size // 2, size // 2 + 1),) for dim, size in enumerate(shape[:-1])}
            shard = Shard(shape, middle)
            row = torch.zeros(shard.local_shape if not is_vector else shape, dtype=torch.float32)
            self.read({name: (shard, row)})
            found.update(f"{name} {list(shape)} ".encode())
            found.update(row.bfloat16().view(torch.int16).numpy().tobytes())
        return found.hexdigest()


def widest(dtypes: Iterable[str]) -> str:
    """The widest of some stored types, which a reader needs to lose nothing; fp8 is read as bf16."""
    kept = ("BF16" if dtype == FP8 else dtype for dtype in dtypes)
    return max(kept, key=list(reversed(DTYPES)).index)


def unpadded(shape: tuple[int, ...], dims: tuple[str, ...], model: ModelSpec) -> tuple[int, ...]:
    """The shape of a parameter without the padding of the vocabulary."""
    return (model.vocab, *shape[1:]) if dims[0] == "vocab" else shape


def adapters_of(model: ModelSpec, adapter: AdapterSpec) -> Iterator[tuple[str, dict[str, range]]]:
    """Each adapted product by its full name, `layers.0.attention.qkv`, with the rows of W of its adapters."""
    for stack in get_table(model, tp=1).stacks:
        ends = [("", product) for end in (stack.entry, stack.exit) for product in end.products]
        blocks = range(stack.layers)
        layers = [(f"{stack.prefix}.{n}.", product) for n in blocks for product in stack.block_of(n).products]
        for prefix, product in [*ends, *layers]:
            if product.is_lookup or not (targets := targets_of(product, model, adapter)):
                continue
            owner, rows = f"{prefix}{product.name}", output_rows(product, model)
            yield owner, {adapter_name(owner, target.part): rows[target.part] for target in targets}


def require_mergeable(values: Values) -> None:
    """Raises InputError where adapters cannot be merged: those of a head that is the word table too."""
    if values.adapter is not None and values.model.tied_embeddings and "head.weight" in values.adapted:
        message = "lm_head has an adapter, but its weight is the word table's too, which the adapter leaves alone"
        raise InputError.of(
            "adapter-tied", "training.adapter.targets", message, "export the adapters, without --merged"
        )


def router_biases_of(origin: Hub | SavedModel) -> RouterBias:
    """The correction biases [E] of each layer with experts at an origin, by its name. Adapters alone have those that
    they were trained with."""
    if isinstance(origin, Hub):
        return router_biases(origin)
    return read_manifest(origin.checkpoint).router_bias


def base_reference(path: Path, origin: Hub | SavedModel) -> BaseReference:
    """What a checkpoint of adapters that start over the weights at `path` says of its base: these, or those that
    adapters at `path` add to themselves."""
    if isinstance(origin, SavedModel) and origin.base is not None:
        return origin.base
    return BaseReference(path=str(path.resolve()), digest=Values.of(origin).digest())


def base_values(checkpoint: Path, model: ModelSpec, reference: BaseReference) -> Values:
    """The weights that the adapters of a checkpoint add to. Raises InputError where they are gone or others."""
    base = open_base(checkpoint, reference)
    if issues := list(differences(model, base.model, Path(reference.path))):
        raise InputError(issues)
    found = Values.of(base)
    if (digest := found.digest()) != reference.digest:
        message = f"its weights have the digest {digest[:12]}, the adapters in {checkpoint} were trained "
        message += f"on {reference.digest[:12]}: another base"
        raise InputError.of("adapter-base", reference.path, message, "put back the weights that they were trained on")
    return found
