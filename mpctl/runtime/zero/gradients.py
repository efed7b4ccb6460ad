"""Gradients by bucket: where a rank keeps them, how they are summed over the replicas, their norm.

What a bucket's gradients take, and what it sends, follows from the ZeRO stage (arXiv 1910.02054,
section 5); n replicas, losses divided by the global batch, so that nothing is averaged:

    0  whole, all-reduced once a step          1  whole, reduce-scattered once a step
    2, 3  a slice; each micro batch's are made whole for a moment, reduce-scattered and added to it,
          so that a step of m micro batches sends m times as much

Last come the sums over tp of what each of its ranks has a part of, and over the stages that hold
copies: a ring adds in an order that depends on the place, and the last sum gives all the same bits.

By hand, 5 elements over 2 replicas: stage 1 keeps 6 (one is padding) and steps 3, stage 2 keeps 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.kernels.parameters import is_sharded
from mpctl.layout.buckets import Bucket
from mpctl.transport.group import Group, Pending

NORM_BLOCK = 1 << 16


@dataclass(frozen=True)
class BucketShard:
    """A bucket on this rank. stages: those that hold it too."""

    bucket: Bucket
    parameters: tuple[nn.Parameter, ...]
    replicas: Group
    stages: Group | None = None

    @property
    def part(self) -> int:
        return self.bucket.part(self.replicas.size)

    @property
    def own(self) -> slice:
        """This rank's slice of the whole, padded bucket."""
        first = self.replicas.rank * self.part
        return slice(first, first + self.part)

    def views(self, whole: Tensor) -> list[Tensor]:
        """Of a flat tensor, each parameter's part in its shape."""
        parts = whole[: self.bucket.numel].split(self.bucket.sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def own_pieces(self, part: Tensor) -> Iterator[tuple[nn.Parameter | None, int, Tensor]]:
        """(parameter, its first element there, elements) of this rank's slice; None: padding."""
        stop = 0
        for number, start, at, length in self.bucket.pieces(self.replicas.size, self.replicas.rank):
            stop = at + length
            yield self.parameters[number], start, part[at:stop]
        if stop < len(part):
            yield None, 0, part[stop:]


class BucketGradients:
    """Whole, and summed whole: ZeRO 0. own: what is stepped; pieces: it, by parameter."""

    def __init__(self, block: BucketShard, dtype: torch.dtype, device: torch.device) -> None:
        self.block, self.dtype, self.device = block, dtype, device
        self.whole: Tensor | None = self._zeros(self._length())
        self.own = self.whole
        views = block.views(self.whole)
        self.pieces: list[tuple[nn.Parameter | None, int, Tensor]] = [
            (p, 0, view) for p, view in zip(block.parameters, views, strict=True)
        ]
        self._receive(views)

    def _length(self) -> int:
        return self.block.bucket.numel

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=self.dtype, device=self.device)

    def _receive(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.block.parameters, views, strict=True):
            if parameter.dtype == self.dtype:
                parameter.grad = view  # autograd adds to it in place
            else:
                parameter.register_post_accumulate_grad_hook(_adder(view))

    def zero(self) -> None:
        assert self.whole is not None
        self.whole.zero_()

    def start(self) -> Pending:
        assert self.whole is not None
        return self.block.replicas.start_all_reduce(self.whole)

    def land(self, reduced: Tensor) -> None:
        """Keep what the reduction gave, here in place."""


class Zero1Gradients(BucketGradients):
    """Whole, of which this rank's slice is summed: ZeRO 1."""

    def __init__(self, block: BucketShard, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(block, dtype, device)
        self.own = self.whole[block.own] if self.whole is not None else self.own
        self.pieces = list(block.own_pieces(self.own))

    def _length(self) -> int:
        return self.block.bucket.padded(self.block.replicas.size)

    def start(self) -> Pending:
        assert self.whole is not None
        return self.block.replicas.start_reduce_scatter(self.whole, 0)

    def land(self, reduced: Tensor) -> None:
        self.own.copy_(reduced)


class ShardedGradients(Zero1Gradients):
    """This rank's slice alone; whole while a micro batch's come and go: ZeRO 2 and 3."""

    def __init__(self, block: BucketShard, dtype: torch.dtype, device: torch.device) -> None:
        self.block, self.dtype, self.device = block, dtype, device
        self.whole = None
        self.arriving: list[Tensor] = []
        self.own = self._zeros(block.part)
        self.pieces = list(block.own_pieces(self.own))
        for number, parameter in enumerate(block.parameters):
            parameter.register_post_accumulate_grad_hook(self._taker(number))

    def _taker(self, number: int) -> Any:
        def take(parameter: Tensor) -> None:
            if parameter.grad is not None:  # else it is put off (kernels/deferred_wgrad.py)
                self._open()[number].add_(parameter.grad)
                parameter.grad = None

        return take

    def _open(self) -> list[Tensor]:
        if self.whole is None:
            self.whole = self._zeros(self._length())
            self.arriving = self.block.views(self.whole)
        return self.arriving

    def zero(self) -> None:
        self.own.zero_()

    def start(self) -> Pending:
        self._open()
        pending = super().start()
        self.whole, self.arriving = None, []
        return pending

    def land(self, reduced: Tensor) -> None:
        self.own.add_(reduced)


def _adder(view: Tensor) -> Any:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:  # else it is put off (kernels/deferred_wgrad.py)
            view.add_(parameter.grad)
            parameter.grad = None

    return add


GRADIENT_STORES: tuple[type[BucketGradients], ...] = (
    BucketGradients, Zero1Gradients, ShardedGradients, ShardedGradients,
)  # fmt: skip


class GradientBuffer:
    """Every gradient of a rank. stores: by bucket; a stage may train nothing."""

    def __init__(
        self,
        blocks: Sequence[BucketShard],
        dtype: torch.dtype,
        device: torch.device,
        *,
        zero: int = 0,
        tp: Group | None = None,
        pp: Group | None = None,
        replicas: Group | None = None,
    ) -> None:
        self.zero_stage = zero
        self.stores = [GRADIENT_STORES[zero](block, dtype, device) for block in blocks]
        self.tp, self.pp = tp or Group(), pp or Group()
        self.replicas = replicas or Group()
        self.device = device

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept from step to step."""
        return [s.own if s.whole is None else s.whole for s in self.stores]

    def zero(self) -> None:
        for store in self.stores:
            store.zero()

    def sum_parts(self) -> None:
        """Over tp and over the stages, once the sums over the replicas are there."""
        for store in self.stores:
            if store.block.bucket.is_partial:
                self.tp.all_reduce(store.own)
            if store.block.stages is not None:
                store.block.stages.all_reduce(store.own)

    def norm(self) -> float:
        """L2 norm of the whole model's gradient, each parameter once: shards are summed over tp,
        slices over the replicas, and copies count on the first of their stages."""
        split, whole = (self._squares(is_split) for is_split in (True, False))
        total = self.tp.all_reduce(split) + whole
        if self.zero_stage:
            total = self.replicas.all_reduce(total)
        return float(self.pp.all_reduce(total).sqrt())

    def _squares(self, is_split: bool) -> Tensor:
        parts = [
            gradient
            for store in self.stores if store.block.stages is None or store.block.stages.rank == 0
            for parameter, _, gradient in store.pieces
            if parameter is not None and is_sharded(parameter) is is_split
        ]  # fmt: skip
        return squared_norm(parts, self.device)

    def scale(self, factor: float) -> None:
        if factor != 1.0:
            for store in self.stores:
                store.own.mul_(factor)


def clip_factor(norm: float, bound: float) -> float:
    """What brings a norm to at most `bound`; 0 means no bound."""
    return bound / norm if 0 < bound < norm else 1.0


def squared_norm(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares, float64: exact enough in blocks without a wide copy of the whole."""
    blocks = [block for part in parts for block in part.reshape(-1).split(NORM_BLOCK)]
    if not blocks:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = torch.promote_types(blocks[0].dtype, torch.float32)  # of 16 bit, 3 digits would be left
    norms = torch._foreach_norm(blocks, dtype=wide)
    return torch.stack(norms).double().square().sum()
