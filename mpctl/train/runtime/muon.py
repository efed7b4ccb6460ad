"""Muon's update of matrices (arXiv 2502.16982), bucket by bucket, equal under every layout.

    m = m + (1 - mu)(g - m),  u = g + mu (m - g) with nesterov, else m,  w = w (1 - r d) - r O(u)

O orthogonalises complete matrices (kernels/newton_schulz.py); everything else is element by element, on the slices
that the optimizer steps. Ranks that share a bucket gather u; those of tp or etp then complete, one matrix at a time,
those that the rank's slice touches (model/layout/matrices.py). Every rank that holds a part of a matrix computes all of
it, from the same bits in the same order, and keeps its own elements.

By hand, a matrix of 4 rows over tp 2 and ZeRO 1 over 2: a rank has a row of u, gathers its two over dp, the four over
tp, and steps its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpctl.core.shard import Shard
from mpctl.model.layout.matrices import Matrix, gather_axis, gathers
from mpctl.spec.muon import MuonSpec
from mpctl.train.kernels.newton_schulz import orthogonalized
from mpctl.train.layers.parameters import assemble, shard_of, take
from mpctl.train.runtime.zero.param_store import ParameterSlice, ParamStore
from mpctl.train.transport.group import Group

ALONE = Group()
MOMENT = "momentum_buffer"
State = dict[str, Tensor]


class StepScalars(NamedTuple):
    """What an update is given: the learning rate, and on a device the divisor of gradients and 1 where nothing may
    change."""

    rate: float
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def chosen(self, new: Tensor, old: Tensor) -> Tensor:
        """`new`, or `old` where nothing may change."""
        return new if self.found_inf is None else torch.where(self.found_inf == 1, old, new)


@dataclass
class Muon:
    """Steps the matrices of some stores by the gradients of their slices.

    matrices: by name. groups: of tp and etp. products: the data type of Newton-Schulz products, that of the values
    when absent. state: of each value its `momentum_buffer` and `step`; dtype: of the former, that of the value when
    absent. undecayed: values without weight decay.
    """

    stores: Sequence[ParamStore]
    matrices: Mapping[str, Matrix]
    groups: Mapping[str, Group]
    settings: MuonSpec
    weight_decay: float
    products: torch.dtype | None = None
    dtype: torch.dtype | None = None
    state: dict[Tensor, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = (
            (name, p) for s in self.stores for name, p in zip(s.shard.bucket.names, s.shard.parameters, strict=True)
        )
        self.of_parameter = {p: self.matrices[name] for name, p in named if name in self.matrices}

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every matrix; all replicas and ranks of tp call it together."""
        for store in self.stores:
            numbers = {p: n for n, p in enumerate(store.shard.parameters) if p in self.of_parameter}
            if numbers:
                stepped = {numbers[p]: part for part in store.stepped if (p := part.parameter) in numbers}
                self._step_bucket(store, list(numbers.values()), stepped, scalars)

    def _step_bucket(
        self, store: ParamStore, numbers: list[int], stepped: dict[int, ParameterSlice], scalars: StepScalars
    ) -> None:
        """numbers: of the bucket's matrices; stepped: this rank's slices of some of them."""
        bucket, replicas = store.shard.bucket, store.shard.replicas
        moved = {number: self._direction(part.values, scalars) for number, part in stepped.items()}
        directions = moved
        if bucket.view.zero:
            wide = torch.promote_types(store.stepped_dtype, torch.float32)
            flat = torch.zeros(bucket.part, dtype=wide, device=store.stepped[0].values.device)
            for number, _, offset, length in bucket.pieces(replicas.rank):
                if number in moved:
                    flat[offset : offset + length] = moved[number]
            moved.clear()
            directions = dict(enumerate(store.shard.views(replicas.all_gather(flat, 0))))
        parameters, axis = store.shard.parameters, gather_axis(bucket.view.name)
        group = self.groups.get(axis, ALONE)
        cut = [n for n in numbers if _cuts(shard_of(parameters[n]))]
        others = [n for n in stepped if n not in cut]
        sizes = gathers(bucket.sizes, bucket.part, cut)
        mine = [n for n in cut if n in stepped]
        for number in others:
            self._apply(stepped[number], self._orthogonal(directions[number], parameters[number]), store, scalars)
        none = next(iter(directions.values())).new_empty(0)
        for k, size in enumerate(sizes):
            if k >= len(mine):  # this slice touches fewer than others
                _gathered(none, size, group)
                continue
            number = mine[k]
            shards = _shards(shard_of(parameters[number]), group)
            whole = assemble(shards, _gathered(directions[number], size, group))
            self._apply(
                stepped[number], take(shards[group.rank], self._orthogonal(whole, parameters[number])), store, scalars
            )

    def _direction(self, value: Tensor, scalars: StepScalars) -> Tensor:
        """u of some elements, whose momentum is updated."""
        state, gradient = self.state_of(value), value.grad
        assert gradient is not None
        wide = torch.promote_types(value.dtype, torch.float32)
        slope, momentum = gradient.to(wide), state[MOMENT].to(wide)
        if scalars.grad_scale is not None:
            slope = slope / scalars.grad_scale
        new = torch.lerp(momentum, slope, 1 - self.settings.momentum)
        state["step"] += 1 if scalars.found_inf is None else 1 - scalars.found_inf
        state[MOMENT].copy_(scalars.chosen(new, momentum))
        return torch.lerp(slope, new, self.settings.momentum) if self.settings.nesterov else new

    def _orthogonal(self, direction: Tensor, parameter: nn.Parameter) -> Tensor:
        """The update of complete matrices [.., m, n]; fused parts each by itself."""
        matrix = self.of_parameter[parameter]
        parts = direction.view(-1, sum(matrix.heights), matrix.columns).split(matrix.heights, -2)
        products = self.products or direction.dtype
        return torch.cat([orthogonalized(part, self.settings, products) for part in parts], -2).view_as(direction)

    def _apply(self, part: ParameterSlice, update: Tensor, store: ParamStore, scalars: StepScalars) -> None:
        """Step a slice by its elements of the rank's part of an update."""
        value = part.values
        own = update.reshape(-1)[part.start : part.start + value.numel()].view_as(value)
        decay = self.weight_decay if part.parameter in store.shard.decayed else 0.0
        old = value.to(own.dtype)
        value.copy_(scalars.chosen(old * (1 - scalars.rate * decay) - scalars.rate * own, old))

    def state_of(self, value: Tensor) -> State:
        """The state of a value, made with a momentum of 0 at its first step."""
        if value not in self.state:
            moment = torch.zeros_like(value, dtype=self.dtype, requires_grad=False)
            self.state[value] = {"step": torch.zeros((), dtype=torch.float32, device=value.device), MOMENT: moment}
        return self.state[value]


def _gathered(part: Tensor, size: int, group: Group) -> list[Tensor]:
    """The parts of every rank of a group, shaped like `part`, in a message of `size` elements a rank."""
    piece = part.new_zeros(size)
    piece[: part.numel()] = part.reshape(-1)
    return [row[: part.numel()].view(part.shape) for row in group.all_gather(piece, 0).view(group.size, size)]


def _cuts(shard: Shard) -> bool:
    """Whether ranks have parts of its matrices, whose sides are the last two dimensions."""
    return shard.local_shape[-2:] != shard.shape[-2:]


def _shards(shard: Shard, group: Group) -> list[Shard]:
    """The part of the matrices that each rank of a group has, where this one's is `shard`: equal blocks in the order
    of the ranks. Other dimensions, those of experts, count as complete.

    By hand, rows 2 and 5 of fused parts of 3 rows on rank 2 of 3: rank 0 has rows 0 and 3.
    """
    shape = (*shard.local_shape[:-2], *shard.shape[-2:])
    first = len(shape) - 2
    return [
        Shard(
            shape,
            {
                dim: tuple(
                    range(b.start + (rank - group.rank) * len(b), b.stop + (rank - group.rank) * len(b)) for b in blocks
                )
                for dim, blocks in shard.cuts.items()
                if dim >= first and shard.local_shape[dim] != shard.shape[dim]
            },
        )
        for rank in range(group.size)
    ]
