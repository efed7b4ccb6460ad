"""Adapters (LoRA, arXiv 2106.09685) of split linear layers: Y += s drop(X) A^T B^T.

A [r, i] and B [o, r] are products of their own, cut by the contraction law (model/operators/adapters.py);
H = X A^T has r columns:

    base      A            B            messages
    column    whole        rows cut     dH summed over tp in backward; under sequence parallelism H
                                        of the own positions is gathered, and dH reduce-scattered
    row       columns cut  whole        H summed over tp in forward, or reduce-scattered
    local     whole        as the base  none: the base's input brings its own sum
    experts   of each expert            none: rows and their results travel as without adapters

Saved for backward: X, which adapters of one product share, and s H; with dropout the dropped X of each
adapter instead. Masks are computed again, and a frozen base saves no X.

Dropout masks follow from the adapter's name and the global positions of X, so they are the same in
every layout.

Letters: b batch, s sequence, i inputs, o outputs, r rank, R rows of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.counter_rng import CounterRNG, DropoutMask
from mpctl.train.kernels.masks import Positions


class AdapterRng:
    """The random numbers of the micro batch that a layer computes; its adapters read them."""

    def __init__(self) -> None:
        self.rng: CounterRNG | None = None


class AdapterDropout:
    """Dropout of an adapter's input [b, s, i].

    p: its probability. rng_site: the adapter's name within the scope of `source`. rows: global
    positions of an input of that length; columns: global numbers of its features.
    """

    def __init__(
        self,
        p: float,
        rng_site: str,
        source: AdapterRng,
        backend: KernelBackend,
        rows: Callable[[int, torch.device], Positions],
        columns: Positions,
    ) -> None:
        self.p, self.rng_site, self.source, self.backend = p, rng_site, source, backend
        self.rows, self.columns = rows, columns

    def __call__(self, x: Tensor) -> Tensor:
        """x [b, s, i] with dropout; no mask is saved for backward."""
        rng = self.source.rng
        if rng is None or not rng.active(self.p):
            return x
        rows = self.rows(x.shape[1], x.device)
        mask = rng.mask(x.shape, self.p, rng_site=self.rng_site, rows=rows, columns=self.columns)
        dropped: Tensor = _Dropped.apply(x, mask, self.backend)
        return dropped


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: DropoutMask, backend: KernelBackend) -> Tensor:
        ctx.mask, ctx.backend = mask, backend
        return backend.dropout(x, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backend.dropout(grad, ctx.mask), None, None


class Adapter(nn.Module):
    """The adapter of one output of a linear layer. A, B: its products, which send what the table
    above says. scale: s. start: the first local column of the base's result that it is added to.
    dropout: of its input; None without."""

    def __init__(
        self, A: nn.Module, B: nn.Module, *, scale: float, start: int = 0, dropout: AdapterDropout | None = None
    ) -> None:
        super().__init__()
        self.A, self.B = A, B
        self.scale, self.start, self.dropout = scale, start, dropout

    def forward(self, x: Tensor, *groups: Any) -> Tensor:
        """x as the base takes it -> s B A drop(x) as the base returns this output. groups: numbers of
        rows of each expert, for experts."""
        if self.dropout is not None:
            x = self.dropout(x)
        h: Tensor = self.A(x, *groups)
        result: Tensor = self.B(h.mul_(self.scale), *groups)
        return result

    def added(self, output: Tensor, x: Tensor, *groups: Any) -> Tensor:
        """The base's output for x, to which the adapter's is added in place."""
        result: Tensor = _Added.apply(output, self(x, *groups), self.start)
        return result

    def extra_repr(self) -> str:
        p = 0.0 if self.dropout is None else self.dropout.p
        return f"scale={self.scale:g}, dropout={p:g}"


class FusedAdapters(nn.ModuleDict):
    """Adapters of several outputs of one product, by name: query, key, value; gate, up."""

    def added(self, output: Tensor, x: Tensor, *groups: Any) -> Tensor:
        """As Adapter's, of each."""
        for adapter in self.values():
            assert isinstance(adapter, Adapter)
            output = adapter.added(output, x, *groups)
        return output


class _Added(torch.autograd.Function):
    """Add to some columns, in place: nothing saves a product's result, which may be a view that autograd
    would not let us write to. The gradient of what is added is a view of the sum's; a slice of autograd's
    would copy the gradient of all columns."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, delta: Tensor, start: int) -> Tensor:
        ctx.columns = start, delta.shape[-1]
        summed = output.data
        summed.narrow(-1, *ctx.columns).add_(delta)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad.narrow(-1, *ctx.columns), None
