"""Gradients by bucket: their memory, their reduction over the replicas, and their norm.

The memory of a bucket's gradients, and the messages over the replicas of its view, follow from the
ZeRO stage (arXiv 1910.02054, section 5). Losses are divided by the global batch size, so gradients
are summed, not averaged:

    0  full size, all-reduced once a step      1  full size, reduce-scattered once a step
    2, 3  a slice; each micro batch's gradients exist in full size while they are computed, are
          reduce-scattered and added to the slice, so that a step of m micro batches sends m times
          as much

Where `parallel.zero_size` cuts the replicas into groups, each of them divides every bucket, and the
ranks with equal slices sum them once a step, after the last reduction within their groups.

Products add to the gradients of matrices where the device's can, and to those of word tables
always, as lookups do (train/layers/parameters.py): under ZeRO 2 and 3 the bucket of a tied table has its
full size from the head's backward on.

The first gradient of a parameter overwrites that of the previous step, later ones are added; a
parameter that has none when its bucket is reduced gets 0. Only if autograd itself accumulates,
which it does when gradients have their parameter's dtype, are they set to 0 before a step.

Partial gradients are summed over their tensor-parallel group, and gradients of shared parameters
over the stages that hold copies, at the end: a ring adds in an order that depends on the rank, and
the last sum gives all ranks the same bits.

By hand, 100 elements over 2 replicas: stage 1 keeps 128 (28 are padding) and steps 64, stage 2
keeps 64.
The norm counts each element of the model once: squares are summed by view and by how many ranks of
the view's shard group hold the same elements, then over that group, under ZeRO over the ranks that
divide a bucket, and over the stages.

By hand, the norm on a grid of 2 x 2 ranks: each element of a matrix is on one rank, so its square
counts fully; a vector of 8 elements has 4 on each rank, so 2 copies each, whose squares count half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from mpctl.core.sharding import DENSE, View, Views
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.layers.parameters import deferred_wgrad_of, full_numel, parallel_attributes, set_sink
from mpctl.train.runtime.zero.param_store import BucketShard, ParameterSlice
from mpctl.train.transport.group import Group, Pending

ALONE = Group()
DENSE_ALONE = MappingProxyType({DENSE: View()})

NORM_BLOCK = 1 << 16  # elements whose squares are summed at a time, on a CPU
DEVICE_NORM_BLOCK = 1 << 28  # elsewhere: kernels sum in blocks themselves; few views


class BucketGradients:
    """Full gradients, all-reduced once a step: ZeRO 0. reduces_each: whether each micro batch's
    gradients are reduced separately.

    full: every gradient of the bucket, flat; None while no full-size tensor exists. views: views of
    `full`, one per parameter; stale: indices of views without a gradient of this step; waiting:
    first gradients that are not copied to their views yet. local: the gradients that this rank's
    optimizer uses. slices: `local` by parameter.
    """

    reduces_each = False

    def __init__(self, shard: BucketShard, dtype: torch.dtype, device: torch.device) -> None:
        self.shard, self.dtype, self.device = shard, dtype, device
        self.waiting = dict[int, Tensor]()
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
        """Whether autograd itself accumulates into the views: they have the parameters' dtype."""
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

    @property
    def passing_tensors(self) -> list[Tensor]:
        """The gradients that exist until they are copied or reduced."""
        return list(self.waiting.values())

    def _accumulator(self, number: int) -> Callable[[Tensor], None]:
        def accumulate(parameter: Tensor) -> None:
            if parameter.grad is not None:  # otherwise it is deferred (train/layers/parameters.py)
                self._add(number, parameter.grad)
                parameter.grad = None

        return accumulate

    def _add(self, number: int, gradient: Tensor) -> None:
        if number in self.waiting:
            self._copy_waiting()
        if number not in self.stale:
            self.views[number].add_(gradient)
            return
        self.stale.discard(number)
        if self.device.type != "cpu" and gradient.dim() == 1:
            self.waiting[number] = gradient
        else:
            self.views[number].copy_(gradient)

    def _copy_waiting(self) -> None:
        """Copy the first gradients of vectors, which are as large as a launch is long, together."""
        if self.waiting:
            torch._foreach_copy_([self.views[n] for n in self.waiting], list(self.waiting.values()))
            self.waiting.clear()

    def take_products(self, kernels: KernelBackend) -> None:
        """Have products add to the gradients of matrices themselves, where the device's do, and
        lookups and heads to those of word tables."""
        for number, parameter in enumerate(self.shard.parameters):
            is_added = kernels.adds_products(parameter.dtype, self.dtype)
            is_added |= parallel_attributes(parameter).is_table
            if is_added and parameter.dim() == 2 and deferred_wgrad_of(parameter) is None:
                set_sink(parameter, _Products(self, number, kernels))

    def add_product(self, number: int, dy: Tensor, x: Tensor, kernels: KernelBackend) -> None:
        """Add dY^T X to the gradient of the parameter of this number."""
        out, adds = self._opened(number)
        kernels.add_product(dy, x, out, adds=adds)

    def add_rows(self, number: int, rows: Tensor, vectors: Tensor, kernels: KernelBackend) -> None:
        """Add vectors to rows of the gradient of the parameter of this number."""
        out, adds = self._opened(number)
        if not adds:
            out.zero_()
        kernels.add_rows(rows, vectors, out)

    def _opened(self, number: int) -> tuple[Tensor, bool]:
        """The gradient of a parameter, and whether it is added to, not overwritten."""
        adds = number not in self.stale
        self.stale.discard(number)
        return self.views[number], adds

    def restart(self) -> list[Tensor]:
        """Begin a step; returns tensors for the caller to set to 0."""
        if self._is_autograds:
            return [self.persistent]
        self.stale = set(range(len(self.views)))
        return []

    def settle(self) -> None:
        """Backward is done with the bucket: set to 0 what has received no gradient."""
        self._copy_waiting()
        for number in sorted(self.stale):
            self.views[number].zero_()
        self.stale.clear()

    def start(self) -> Pending:
        """Begin to reduce the gradients accumulated so far over the replicas."""
        self.settle()
        return self.shard.replicas.start_all_reduce(self.persistent)

    def accept(self, reduced: Tensor) -> None:
        """Take the result of the reduction, which is in place already."""

    def start_equal(self) -> Pending:
        """Begin to sum this rank's slice over the ranks that hold the same one, after the last
        reduction of a step."""
        return self.shard.equal.start_all_reduce(self.local)


@dataclass(frozen=True)
class _Products:
    """The `GradientSink` of one parameter of a bucket."""

    store: BucketGradients
    number: int
    kernels: KernelBackend

    def add_product(self, dy: Tensor, x: Tensor) -> None:
        """Add dY^T X to the parameter's gradient."""
        self.store.add_product(self.number, dy, x, self.kernels)

    def add_rows(self, rows: Tensor, vectors: Tensor) -> None:
        """Add vectors to rows of the parameter's gradient."""
        self.store.add_rows(self.number, rows, vectors, self.kernels)


class Zero1Gradients(BucketGradients):
    """Full gradients, reduce-scattered in place once a step, after which this rank's slice has the
    sum: ZeRO 1. Any number of buckets may be in flight without extra memory."""

    def _full_numel(self) -> int:
        return self.shard.bucket.padded

    def _take_local(self, full: Tensor) -> tuple[Tensor, list[ParameterSlice]]:
        local = full[self.shard.local_range]
        return local, list(self.shard.parameter_slices(local))

    def restart(self) -> list[Tensor]:
        """As BucketGradients', or else returns the padding, which no gradient overwrites."""
        return super().restart() or [self.persistent[self.shard.bucket.numel :]]

    def start(self) -> Pending:
        """Begin to reduce-scatter the gradients accumulated in this step."""
        self.settle()
        return self.shard.replicas.start_reduce_scatter_in_place(self.persistent)


class ShardedGradients(BucketGradients):
    """This rank's slice, to which each micro batch's reduced gradients are added: ZeRO 2 and 3.
    The full size exists from the first gradient of a backward to the start of its reduction.

    If weight gradients are deferred, those of biases and norms come much earlier. They are kept
    separately until the first deferred one; otherwise all buckets of a stage would have their full
    size at once. early: these gradients, by index of the parameter.
    """

    reduces_each = True

    def __init__(self, shard: BucketShard, dtype: torch.dtype, device: torch.device) -> None:
        self.shard, self.dtype, self.device = shard, dtype, device
        self.full, self.views, self.stale = None, list[Tensor](), set[int]()
        self.waiting = dict[int, Tensor]()
        self.early: dict[int, Tensor] = {}
        self.local = self._zeros(shard.bucket.part)
        self.slices = list(shard.parameter_slices(self.local))
        for number, parameter in enumerate(shard.parameters):
            parameter.register_post_accumulate_grad_hook(self._accumulator(number))

    @property
    def passing_tensors(self) -> list[Tensor]:
        """As BucketGradients', with the full size and the early gradients."""
        full = () if self.full is None else (self.full,)
        return [*super().passing_tensors, *self.early.values(), *full]

    def _add(self, number: int, gradient: Tensor) -> None:
        if self.full is None:
            if self._is_early(number):
                self._keep(number, gradient)
                return
            self._allocate()
        super()._add(number, gradient)

    def _opened(self, number: int) -> tuple[Tensor, bool]:
        """As BucketGradients', in the full size, which is allocated for the first."""
        if self.full is not None or not self._is_early(number):
            if self.full is None:
                self._allocate()
            return super()._opened(number)
        if number in self.early:
            return self.early[number], True
        parameter = self.shard.parameters[number]
        self.early[number] = torch.empty_like(parameter, dtype=self.dtype)
        return self.early[number], False

    def _is_early(self, number: int) -> bool:
        """Whether the parameter's gradient is computed earlier than deferred ones of the bucket."""
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
        """The full-size tensor with early gradients and zeros as padding, else uninitialized."""
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
        """Begin to reduce-scatter one micro batch's gradients, and release the full-size tensor."""
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
    """All gradients of a rank. stores: one per bucket, in the order of reduction; none on a stage
    that trains nothing. groups: this rank's groups by name; groups of one rank may be omitted.
    norm_block: elements whose squares are summed at a time. kernels: those of the device, whose
    products may add to gradients."""

    def __init__(
        self,
        shards: Sequence[BucketShard],
        dtype: torch.dtype,
        device: torch.device,
        groups: Mapping[str, Group] = MappingProxyType({}),
        *,
        views: Views = DENSE_ALONE,
        norm_block: int = NORM_BLOCK,
        kernels: KernelBackend = TORCH_BACKEND,
    ) -> None:
        self.groups, self.views = groups, views
        self.device, self.norm_block = device, norm_block
        self.stores = [GRADIENT_STORES[shard.bucket.view.zero](shard, dtype, device) for shard in shards]
        for store in self.stores:
            store.take_products(kernels)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are kept from step to step."""
        return [store.persistent for store in self.stores]

    def zero(self) -> None:
        """Begin a step: set to 0 what gradients are added to; the rest is overwritten."""
        if tensors := [tensor for store in self.stores for tensor in store.restart()]:
            torch._foreach_zero_(tensors)  # some hundred of them in a kernel on a GPU

    def sum_parts(self) -> None:
        """Sum partial gradients over their tensor-parallel group, and shared ones over the stages,
        once the sums over the replicas are complete."""
        for store in self.stores:
            if partial := store.shard.bucket.partial:
                self.groups[partial].all_reduce(store.local)
            if store.shard.stages is not None:
                store.shard.stages.all_reduce(store.local)

    def norm(self) -> Tensor:
        """L2 norm of the gradient of the full model, a float64 scalar on the device, equal on all
        ranks up to rounding, since groups may sum in different orders. Each element counts once:
        shards are summed over the shard group of their view, in which n ranks with the same shard
        count 1/n each; slices are summed over the ranks that divide a bucket; copies count on the
        first of their stages."""
        total = sum(map(self._squares_of, self.views.values()), self._zeros())
        return self._group("pp").all_reduce(total).sqrt()

    def _squares_of(self, view: View) -> Tensor:
        squares, shards = self._squared_norms(view), self._group(view.shard_group)
        replicated = squares.pop(shards.size, self._zeros())
        sharded = sum((square / copies for copies, square in squares.items()), self._zeros())
        total = shards.all_reduce(sharded) + replicated
        return self._group(view.zero_group).all_reduce(total) if view.zero else total

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
        """Multiply the gradients that the optimizer uses."""
        if factor != 1.0:
            for store in self.stores:
                store.local.mul_(factor)


def squared_norm(tensors: Sequence[Tensor], device: torch.device, *, block: int = NORM_BLOCK) -> Tensor:
    """Sum of squares, a float64 scalar. Summing in blocks of `block` elements is exact enough
    without a float64 copy of the tensors."""
    blocks = [part for tensor in tensors for part in tensor.reshape(-1).split(block)]
    if not blocks:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = torch.promote_types(blocks[0].dtype, torch.float32)  # in 16 bits 3 digits would be left
    norms = torch._foreach_norm(blocks, dtype=wide)
    return torch.stack(norms).double().square().sum()
