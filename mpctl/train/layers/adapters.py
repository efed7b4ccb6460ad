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

DoRA (arXiv 2402.09353, equation 5) gives the rows of W + s B A trained lengths m, with
c = m / |W + s B A|, a norm that is a constant in backward (section 4.3):

    Y = c Z + bias,  Z = X W^T + s X A^T B^T       dm = sum over positions of dY Z / |W + s B A|

With dropout Z is of the dropped X in both terms, as PEFT has it: Y = X W^T + c Z - drop(X) W^T + bias.
Z and the norms are saved. |W + s B A|^2 = |W|^2 + s (2 W A^T + s B A A^T) . B, the sums over a row; a row
base sums them over tp. m starts as the norm, from which W + s B A starts as W (`start_lengths`).

Dropout masks follow from the adapter's name and the global positions of X, so they are the same in
every layout.

Letters: b batch, s sequence, i inputs, o outputs, r rank, R rows of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.counter_rng import CounterRNG, DropoutMask
from mpctl.train.kernels.masks import Positions
from mpctl.train.transport.group import Group

ALONE = Group()


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
    dropout: of its input; None without. magnitude: DoRA's lengths of these rows; None without. columns:
    the ranks with other columns of W and A."""

    def __init__(
        self,
        A: nn.Module,
        B: nn.Module,
        *,
        scale: float,
        start: int = 0,
        dropout: AdapterDropout | None = None,
        magnitude: nn.Parameter | None = None,
        columns: Group = ALONE,
    ) -> None:
        super().__init__()
        self.A, self.B, self.magnitude = A, B, magnitude
        self.scale, self.start, self.dropout, self.columns = scale, start, dropout, columns

    @property
    def has_lengths(self) -> bool:
        """Whether it scales the base's result, to which a bias is then added."""
        return self.magnitude is not None

    def forward(self, x: Tensor, *groups: Any) -> Tensor:
        """drop(x) as the base takes it -> s B A drop(x) as the base returns this output. groups: numbers
        of rows of each expert, for experts."""
        h: Tensor = self.A(x, *groups)
        result: Tensor = self.B(h.mul_(self.scale), *groups)
        return result

    def added(self, output: Tensor, x: Tensor, weight: Tensor, *groups: Any) -> Tensor:
        """The base's output for x, to which the adapter's is added in place. weight: the base's."""
        dropped = x if self.dropout is None else self.dropout(x)
        if self.has_lengths:
            scaled: Tensor = _Scaled.apply(output, (self.start,), *self._scaled(x, dropped, weight))
            return scaled
        result: Tensor = _Added.apply(output, self(dropped, *groups), self.start)
        return result

    def _scaled(self, x: Tensor, dropped: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        """The adapter's result, the base's of the dropped x if it is another, lengths and norms."""
        own = None if dropped is x else F.linear(dropped, self.rows(weight))
        return self(dropped), own, self.magnitude, self.norms(weight)

    def rows(self, weight: Tensor) -> Tensor:
        """Its rows of the base's weight."""
        return weight.detach().narrow(0, self.start, len(cast(Tensor, self.B.weight)))

    @torch.no_grad()
    def norms(self, weight: Tensor) -> Tensor:
        """|W + s B A| of this rank's rows of W, in float32 at least, never 0. weight: the base's."""
        rows, a, b = self.rows(weight), cast(Tensor, self.A.weight), cast(Tensor, self.B.weight)
        return row_norms(rows, a, b, self.scale, self.columns)

    def extra_repr(self) -> str:
        p = 0.0 if self.dropout is None else self.dropout.p
        return f"scale={self.scale:g}, dropout={p:g}"


class FusedAdapters(nn.ModuleDict):
    """Adapters of several outputs of one product, by name: query, key, value; gate, up."""

    @property
    def has_lengths(self) -> bool:
        """As Adapter's."""
        return any(each.has_lengths for each in self.adapters)

    @property
    def adapters(self) -> list[Adapter]:
        """Each of them."""
        return [cast(Adapter, each) for each in self.values()]

    def added(self, output: Tensor, x: Tensor, weight: Tensor, *groups: Any) -> Tensor:
        """As Adapter's, of each; with lengths by one function, whose backward copies a gradient once."""
        if not self.has_lengths:
            for adapter in self.adapters:
                output = adapter.added(output, x, weight, *groups)
            return output
        parts: list[Tensor | None] = []
        for each in self.adapters:
            parts += each._scaled(x, x if each.dropout is None else each.dropout(x), weight)
        scaled: Tensor = _Scaled.apply(output, tuple(each.start for each in self.adapters), *parts)
        return scaled


def lengthened(module: nn.Module) -> Iterator[tuple[nn.Parameter, Adapter]]:
    """The adapters with lengths inside of a module, each with the weight of its base."""
    for base in module.modules():
        lora = getattr(base, "lora", None)
        for each in lora.adapters if isinstance(lora, FusedAdapters) else [lora]:
            if isinstance(each, Adapter) and each.has_lengths:
                yield cast(nn.Parameter, base.weight), each


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float, columns: Group = ALONE) -> Tensor:
    """|W + s B A| of each row in float32 at least, never 0. columns: the ranks that have the other
    columns of W [o, i] and A [r, i]."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    squares = torch.linalg.vector_norm(weight, dim=-1, dtype=wide).square_()
    b = b.to(wide)
    inner = (weight @ a.mT).to(wide).mul_(2).addmm_(b, (a @ a.mT).to(wide), alpha=scale)  # [o, r]
    squares.add_(inner.mul_(b).sum(-1), alpha=scale)
    return columns.all_reduce(squares).clamp_(min=torch.finfo(torch.float32).tiny).sqrt_()


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


class _Scaled(torch.autograd.Function):
    """DoRA's Y, in place as `_Added`'s. starts: the first column of each adapter. tensors: of each its
    result, which becomes Z and is kept; the base's result of the dropped X, None where X is not dropped;
    lengths; norms."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, starts: tuple[int, ...], *tensors: Tensor | None) -> Tensor:
        ctx.starts, ctx.is_dropped = starts, tensors[1] is not None
        summed, kept = output.data, []
        for start, (delta, base, lengths, norms) in zip(starts, _fours(tensors), strict=True):
            columns = summed.narrow(-1, start, delta.shape[-1])
            z = delta.data.add_(columns if base is None else base)
            if base is None:
                torch.mul(z, _ratio(lengths, norms, z), out=columns)
            else:
                columns.sub_(base).addcmul_(z, _ratio(lengths, norms, z))
            kept += [z, lengths, norms]
        ctx.save_for_backward(*kept)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, own = ctx.saved_tensors, grad
        if not ctx.is_dropped:
            own = grad.new_empty(grad.shape) if sum(z.shape[-1] for z in kept[::3]) == grad.shape[-1] else grad.clone()
        found: list[Tensor | None] = []
        for start, z, lengths, norms in zip(ctx.starts, kept[::3], kept[1::3], kept[2::3], strict=True):
            dy = grad.narrow(-1, start, z.shape[-1])
            dz = torch.empty_like(dy) if ctx.is_dropped else own.narrow(-1, start, z.shape[-1])
            torch.mul(dy, z, out=dz)
            dm = dz.flatten(0, -2).sum(0, dtype=norms.dtype).div_(norms).to(lengths.dtype)
            torch.mul(dy, _ratio(lengths, norms, z), out=dz)
            found += [dz, dz - dy if ctx.is_dropped else None, dm, None]
        return own, None, *found


def _ratio(lengths: Tensor, norms: Tensor, like: Tensor) -> Tensor:
    return (lengths / norms).to(like.dtype)


def _fours(tensors: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(*(tensors[at::4] for at in range(4)), strict=True)
