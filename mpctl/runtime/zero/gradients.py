"""Gradients by bucket: where a rank keeps them, how they are reduced over the replicas, their norm.

What a bucket's gradients take, and what it sends over the replicas of its view, follows from the
ZeRO stage (arXiv 1910.02054, section 5). Losses are divided by the global batch, so that nothing is
averaged:

    0  full size, all-reduced once a step      1  full size, reduce-scattered once a step
    2, 3  a slice; each micro batch's gradients exist in full size while they are computed, are
          reduce-scattered and added to the slice, so that a step of m micro batches sends m times
          as much

The first gradient of a parameter overwrites what the step before left, later ones are added; what
none has reached when its bucket is reduced is set to 0. Only autograd's own sums, where gradients
have their parameter's dtype, need zeros before.

Last come the sums of gradients of which each tensor-parallel rank of a group has a part, and those
over the stages that hold copies of a parameter: a ring adds in an order that depends on the rank,
and the last sum gives all ranks the same bits.

By hand, 100 elements over 2 replicas: stage 1 keeps 128 (28 are padding) and steps 64, stage 2
keeps 64.
The norm counts each element of the model once: squares are summed by view and by how many ranks of
the view's shard group hold the same elements, then over that group, under ZeRO over the replicas,
and over the stages.

By hand, the norm over a square of 2 x 2 ranks: a matrix is on one rank each, so its squares count
whole; a vector of 8 elements has 4 on each rank and so 2 copies, whose squares count half each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from mpctl.layers.parameters import deferred_wgrad_of, full_numel
from mpctl.runtime.zero.param_store import BucketShard, ParameterSlice
from mpctl.sharding import DENSE, View, Views
from mpctl.transport.group import Group, Pending

ALONE = Group()
DENSE_ALONE = MappingProxyType({DENSE: View()})

NORM_BLOCK = 1 << 16  # elements whose squares are summed at a time, on a CPU
DEVICE_NORM_BLOCK = 1 << 28  # elsewhere: a kernel sums in blocks of its own; fewer views to make


class BucketGradients:
    """Full gradients, all-reduced once a step: ZeRO 0. reduces_each: whether each micro batch's
    gradients are reduced by themselves.

    full: every gradient of the bucket, flat; None while no full-size tensor exists. views: of
    `full`, by parameter; stale: numbers of those that hold nothing of this step yet. local: what
    this rank's optimizer uses. slices: `local` by parameter.
    """

    reduces_each = False

    def __init__(self, shard: BucketShard, dtype: torch.dtype, device: torch.device) -> None:
        self.shard, self.dtype, self.device = shard, dtype, device
        full = self._zeros(self._full_numel())
        self.full: Tensor | None = full
        self.views, self.stale = list(shard.views(full)), set[int]()
        self.local, self.slices = self._take_local(full)
        for number, (parameter, view) in enumerate(zip(shard.parameters, self.views, strict=True)):
            if self._is_autograds:
                parameter.grad = view
            else:
                parameter.register_post_accumulate_grad_hook(self._accumulator(number))

    @property
    def _is_autograds(self) -> bool:
        """Whether autograd itself adds to the views, of the parameters' dtype."""
        return self.shard.parameters[0].dtype == self.dtype

    def _full_numel(self) -> int:
        return self.shard.bucket.numel

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def _take_local(self, full: Tensor) -> tuple[Tensor, list[ParameterSlice]]:
        shard = self.shard
        pairs = zip(shard.parameters, shard.views(full), strict=True)
        return full, [ParameterSlice(parameter, 0, view) for parameter, view in pairs]

    @property
    def persistent(self) -> Tensor:
        """The tensor that is kept from step to step."""
        return self.local if self.full is None else self.full

    def _accumulator(self, number: int) -> Callable[[Tensor], None]:
        def accumulate(parameter: Tensor) -> None:
            if parameter.grad is not None:  # else it is deferred (layers/parameters.py)
                self._add(number, parameter.grad)
                parameter.grad = None

        return accumulate

    def _add(self, number: int, gradient: Tensor) -> None:
        if number in self.stale:
            self.stale.discard(number)
            self.views[number].copy_(gradient)
        else:
            self.views[number].add_(gradient)

    def restart(self) -> list[Tensor]:
        """Begin a step; returns what the caller is to set to 0."""
        if self._is_autograds:
            return [self.persistent]
        self.stale = set(range(len(self.views)))
        return []

    def settle(self) -> None:
        """Backward is done with the bucket: what no gradient has reached is 0."""
        for number in sorted(self.stale):
            self.views[number].zero_()
        self.stale.clear()

    def start(self) -> Pending:
        """Begin to reduce over the replicas what backward has added so far."""
        self.settle()
        return self.shard.replicas.start_all_reduce(self.persistent)

    def accept(self, reduced: Tensor) -> None:
        """Keep the result of the reduction, which is in place already."""


class Zero1Gradients(BucketGradients):
    """Full gradients, reduce-scattered once a step, in place, so that this rank's slice of them is
    summed: ZeRO 1. Any number of buckets may travel at once without memory of their own."""

    def _full_numel(self) -> int:
        return self.shard.bucket.padded

    def _take_local(self, full: Tensor) -> tuple[Tensor, list[ParameterSlice]]:
        local = full[self.shard.local_range]
        return local, list(self.shard.parameter_slices(local))

    def restart(self) -> list[Tensor]:
        """As BucketGradients'; padding is nobody's to overwrite."""
        return super().restart() or [self.persistent[self.shard.bucket.numel :]]

    def start(self) -> Pending:
        """Begin to reduce-scatter what backward has added in this step."""
        self.settle()
        return self.shard.replicas.start_reduce_scatter_in_place(self.persistent)


class ShardedGradients(BucketGradients):
    """This rank's slice, to which each micro batch's reduced gradients are added: ZeRO 2 and 3.
    The full size exists from the first gradient of a backward to the start of its reduction.

    Where weight gradients are deferred, those of biases and norms come much earlier. They are kept
    by themselves until the first deferred one: else all of a stage's buckets would have their full
    size at once. early: these gradients, by number of the parameter.
    """

    reduces_each = True

    def __init__(self, shard: BucketShard, dtype: torch.dtype, device: torch.device) -> None:
        self.shard, self.dtype, self.device = shard, dtype, device
        self.full, self.views, self.stale = None, list[Tensor](), set[int]()
        self.early: dict[int, Tensor] = {}
        self.local = self._zeros(shard.bucket.part)
        self.slices = list(shard.parameter_slices(self.local))
        for number, parameter in enumerate(shard.parameters):
            parameter.register_post_accumulate_grad_hook(self._accumulator(number))

    def _add(self, number: int, gradient: Tensor) -> None:
        if self.full is None:
            if self._is_early(number):
                self._keep(number, gradient)
                return
            self._allocate()
        super()._add(number, gradient)

    def _is_early(self, number: int) -> bool:
        """Whether the parameter's gradient is computed before others of the bucket, deferred."""
        parameters = self.shard.parameters
        if deferred_wgrad_of(parameters[number]):
            return False
        return any(deferred_wgrad_of(parameter) for parameter in parameters)

    def _keep(self, number: int, gradient: Tensor) -> None:
        if number in self.early:
            self.early[number].add_(gradient)
        else:
            is_view = gradient.untyped_storage().nbytes() > gradient.nbytes
            self.early[number] = gradient.to(self.dtype, copy=is_view)

    def _allocate(self) -> Tensor:
        """The full size with the early gradients, and 0 in its padding; no other values."""
        shard, numel = self.shard, self.shard.bucket.numel
        self.full = full = torch.empty(shard.bucket.padded, dtype=self.dtype, device=self.device)
        full[numel:].zero_()
        self.views = list(shard.views(full))
        self.stale = set(range(len(self.views))) - self.early.keys()
        for number, gradient in self.early.items():
            self.views[number].copy_(gradient)
        self.early.clear()
        return full

    def restart(self) -> list[Tensor]:
        """Begin a step; this rank's slice is to be set to 0."""
        return [self.local]

    def start(self) -> Pending:
        """Begin to reduce-scatter one micro batch's gradients, whose full size is released."""
        full = self._allocate() if self.full is None else self.full
        self.settle()
        pending = self.shard.replicas.start_reduce_scatter(full, 0)
        self.full, self.views = None, []
        return pending

    def accept(self, reduced: Tensor) -> None:
        """Add the sum of this rank's slice to those of earlier micro batches."""
        self.local.add_(reduced)


GRADIENT_STORES: tuple[type[BucketGradients], ...] = (
    BucketGradients,
    Zero1Gradients,
    ShardedGradients,
    ShardedGradients,
)


class GradientBuffer:
    """Every gradient of a rank. stores: one a bucket, in the order of their reduction; none on a
    stage that trains nothing. groups: those of this rank by name; a group of one rank may be left
    out. norm_block: elements whose squares are summed at a time."""

    def __init__(
        self,
        shards: Sequence[BucketShard],
        dtype: torch.dtype,
        device: torch.device,
        groups: Mapping[str, Group] = MappingProxyType({}),
        *,
        views: Views = DENSE_ALONE,
        norm_block: int = NORM_BLOCK,
    ) -> None:
        self.groups, self.views = groups, views
        self.device, self.norm_block = device, norm_block
        self.stores = [
            GRADIENT_STORES[shard.bucket.view.zero](shard, dtype, device) for shard in shards
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are kept from step to step."""
        return [store.persistent for store in self.stores]

    def zero(self) -> None:
        """Begin a step: what gradients are added to is 0, the rest is overwritten."""
        if tensors := [tensor for store in self.stores for tensor in store.restart()]:
            torch._foreach_zero_(tensors)  # on a GPU in a kernel for some hundred of them

    def sum_parts(self) -> None:
        """Sum partial gradients over their tensor-parallel group, and shared ones over the stages,
        once the sums over the replicas are complete."""
        for store in self.stores:
            if partial := store.shard.bucket.partial:
                self.groups[partial].all_reduce(store.local)
            if store.shard.stages is not None:
                store.shard.stages.all_reduce(store.local)

    def norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, a float64 scalar on the device. Each element
        counts once: shards are summed over the shard group of their view, where each of the ranks
        that hold the same one counts its share, slices over the replicas, and copies count on the
        first of their stages."""
        total = sum(map(self._squares_of, self.views.values()), self._zeros())
        return self._group("pp").all_reduce(total).sqrt()

    def _squares_of(self, view: View) -> Tensor:
        """The sum of squares of a view's gradients on this stage."""
        squares, shards = self._squared_norms(view), self._group(view.shard_group)
        replicated = squares.pop(shards.size, self._zeros())
        sharded = sum((square / copies for copies, square in squares.items()), self._zeros())
        total = shards.all_reduce(sharded) + replicated
        return self._group(view.replica_group).all_reduce(total) if view.zero else total

    def _squared_norms(self, view: View) -> dict[int, Tensor]:
        """Sums of squares of a view's gradients on this rank, by the number of ranks of the shard
        group that hold the same elements of a parameter."""
        ranks = self._group(view.shard_group).size
        gradients: dict[int, list[Tensor]] = {}
        for store in self.stores:
            is_counted = store.shard.stages is None or store.shard.stages.rank == 0
            if is_counted and store.shard.bucket.view.name == view.name:
                for parameter, _, values in store.slices:
                    if parameter is not None:
                        copies = ranks * parameter.numel() // full_numel(parameter)
                        gradients.setdefault(copies, []).append(values)
        block = self.norm_block
        return {n: squared_norm(g, self.device, block=block) for n, g in gradients.items()}

    def _group(self, name: str) -> Group:
        return self.groups.get(name, ALONE)

    def _zeros(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def scale(self, factor: float) -> None:
        """Multiply what the optimizer uses."""
        if factor != 1.0:
            for store in self.stores:
                store.local.mul_(factor)


def squared_norm(
    tensors: Sequence[Tensor], device: torch.device, *, block: int = NORM_BLOCK
) -> Tensor:
    """Sum of squares, a float64 scalar: exact enough in blocks of so many elements, without a
    float64 copy of the tensors."""
    blocks = [part for tensor in tensors for part in tensor.reshape(-1).split(block)]
    if not blocks:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = torch.promote_types(blocks[0].dtype, torch.float32)  # of 16 bit, 3 digits would be left
    norms = torch._foreach_norm(blocks, dtype=wide)
    return torch.stack(norms).double().square().sum()
