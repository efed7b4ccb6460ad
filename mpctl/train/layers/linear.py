"""Linear layers split over a group: Y = X W^T + b, with W [out, in].

The split is Megatron-LM's (arXiv 1909.08053, section 3, equations 1 to 3), with A = W^T:

- A column-parallel layer splits A by columns: Y = X [A1 A2]. Forward needs no communication; in
  backward an all-reduce sums dX (operator f of mappings.py).
- A row-parallel layer splits A by rows: Y = X1 A1 + X2 A2. An all-reduce sums Y in forward
  (operator g), and the bias is added once, after the sum. Backward needs no communication.

A column layer followed by a row layer costs one all-reduce forward and one backward.

With sequence parallelism (arXiv 2205.05198, section 4.2.2) the input of the column layer and the
output of the row layer are split over the sequence, [b, s/t, .]. The column layer then makes 1
all-gather forward, and backward 1 all-gather (of X, again) and 1 reduce-scatter (of dX). The row
layer makes 1 reduce-scatter forward and 1 all-gather backward. Each gathered tensor has b*s*i or
b*s*o elements.

If several outputs are fused into one product (q, k, v), each is split separately. Six columns in
three parts on t=2 ranks: rank 0 holds columns 0, 2, 4 and rank 1 holds columns 1, 3, 5.

Backward of a column-parallel layer overlaps its messages. It has two products and one sum:

    dX = dY W      partial: summed over the group
    dW = dY^T X    complete: needs no message          db = dY summed over rows

dX comes first, its sum is started, and dW and db are computed before it is waited for, so that the
message is hidden if dW takes longer. With sequence parallelism X is saved as the shard [b, s/t, i];
its second all-gather runs while dX is computed, then the reduce-scatter of dX while dW is. For a
weight with a `DeferredWgrad`, dW and the gather of X are deferred (parameters.py). A tensor that
needs no gradient costs neither product nor message.

Letters: b batch, s sequence, i in_features, o out_features, t ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpctl.core.shard import Shard
from mpctl.core.sharding import local_range, local_size, overlapped_parts, split_parts
from mpctl.train.kernels.activation import Activation
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.layers.fp8 import Fp8Operands, Fp8Product
from mpctl.train.layers.mappings import (
    SEQUENCE,
    gather_from_region,
    reduce_from_region,
    scatter_sequence_sum,
    scatter_to_region,
)
from mpctl.train.layers.parameters import (
    ZEROS,
    DeferredWgrad,
    Init,
    StoredWeight,
    defer_wgrad,
    deferred_wgrad_of,
    shard_of,
    shard_parameter,
    sink_of,
    stored_of,
)
from mpctl.train.transport.group import Group, Pending

WEIGHTS = Init("normal", 0.02)
ALONE = Group()  # one rank: for a product that sends nothing itself


class Adapters(Protocol):
    """The adapters of a linear layer (adapters.py)."""

    @property
    def has_lengths(self) -> bool:
        """Whether they scale the layer's product, to which its bias is then added."""

    def added(self, output: Tensor, x: Tensor, weight: Tensor, *groups: Any) -> Tensor:
        """The layer's output for x with theirs added; overwrites it. weight: the layer's. groups: numbers
        of rows of each expert, where it has experts."""


def adapted(
    lora: Adapters | None,
    product: Callable[[Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """The output of a linear layer for x, with those of its adapters, if it has any. product: of x and
    `weight`, with a bias."""
    if lora is None:
        return product(bias)
    if bias is None or not lora.has_lengths:
        return lora.added(product(bias), x, weight)
    return lora.added(product(None), x, weight).add_(bias)


class ParallelLinear(nn.Module):
    """Base of the column- and row-parallel layers: one weight, whose products may be in fp8 and
    whose gradient a schedule may defer (`DefersWgrad`, `CastsToFp8`). lora: adapters of the product,
    whose results are added to it."""

    weight: nn.Parameter
    fp8: Fp8Operands | None
    lora: Adapters | None

    def __init__(self) -> None:
        super().__init__()
        self.lora = None

    def defer_wgrad(self, deferred: DeferredWgrad) -> None:
        """Make backward defer the weight's gradient to `deferred`."""
        defer_wgrad(self.weight, deferred)

    def fp8_products(self) -> dict[str, Fp8Product]:
        """The product, if it is in fp8."""
        return {} if self.fp8 is None else {"": Fp8Product(self.fp8, self.weight)}

    def _product(
        self, x: Tensor, bias: Tensor | None, *, group: Group, sequence_parallel: bool = False, overlaps: bool = False
    ) -> Tensor:
        return column_product(
            x, self.weight, bias, group=group, sequence_parallel=sequence_parallel, overlaps=overlaps, fp8=self.fp8
        )


class ColumnParallelLinear(ParallelLinear):
    """A linear layer with outputs split over `group`: [b, s, i] -> [b, s, o/t].

    gather_output: return [b, s, o], the columns in the order of an unsplit layer.
    stride: the output consists of this many equal parts, each of which is split separately.
    parts: the sizes of the parts where they differ; they sum to out_features.
    skip_bias_add: return (output, bias), for a caller that adds the bias in another kernel.
    sequence_parallel: take [b, s/t, i]; it is gathered for the product and again in backward, so
    that only the shard is saved. overlaps: forward gathers it in two halves, the second while the
    first is multiplied; products in fp8 gather it whole.
    fp8: casts the operands of its products, which are then multiplied in fp8 (fp8.py).

    Raises ValueError if a part is not divisible by the number of ranks, or if gather_output and
    skip_bias_add are both set.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        overlaps: bool = False,
        stride: int = 1,
        parts: Sequence[int] | None = None,
        skip_bias_add: bool = False,
        fp8: Fp8Operands | None = None,
        init: Init = WEIGHTS,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if gather_output and skip_bias_add:
            raise ValueError("gather_output and skip_bias_add: the bias would stay split (drop one)")
        self.group, self.gather_output, self.skip_bias_add = group, gather_output, skip_bias_add
        self.sequence_parallel, self.overlaps, self.fp8 = sequence_parallel, overlaps, fp8
        self.parts = _checked_parts(out_features, stride, parts)
        self.in_features, self.out_features = in_features, out_features
        own = split_parts(self.parts, parts=group.size, index=group.rank)
        self.weight = shard_parameter(
            Shard((out_features, in_features), {0: own}), init=init, dtype=dtype, device=device
        )
        self.bias = (
            shard_parameter(Shard((out_features,), {0: own}), init=ZEROS, dtype=dtype, device=device) if bias else None
        )

    def forward(self, x: Tensor, *, bias_gradient: bool = True) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [b, s, i], or [b, s/t, i] with sequence_parallel -> [b, s, o/t].

        [b, s, o] with gather_output; a pair (output, bias) with skip_bias_add. bias_gradient: False
        leaves the bias's gradient to the caller, whose next kernel sums it.
        """
        bias: Tensor | None = None if self.skip_bias_add else self.bias
        if bias is not None and not bias_gradient:
            bias = bias.detach()
        split, overlaps = self.sequence_parallel, self.overlaps
        product = partial(self._product, x, group=self.group, sequence_parallel=split, overlaps=overlaps)
        output = adapted(self.lora, product, x, self.weight, bias)
        if self.skip_bias_add:
            return output, self.bias
        return self._gathered(output) if self.gather_output else output

    def _gathered(self, output: Tensor) -> Tensor:
        # [b, s, o/t] -> [b, s, o]
        whole = gather_from_region(output, self.group)
        if self.group.size == 1 or len(self.parts) == 1:
            return whole
        t = self.group.size
        widths = [[len(b) for b in split_parts(self.parts, parts=t, index=r)] for r in range(t)]
        # by rank, then by part -> by part, then by rank
        pieces = [own.split(w, -1) for own, w in zip(whole.chunk(t, -1), widths, strict=True)]
        return torch.cat([piece for of_part in zip(*pieces, strict=True) for piece in of_part], -1)

    def extra_repr(self) -> str:
        local = f"{self.in_features} -> {self.weight.shape[0]} of {self.out_features}"
        fused = f", parts={self.parts}" if len(self.parts) > 1 else ""
        return f"{local}{fused}, bias={self.bias is not None}, t={self.group.size}"


class RowParallelLinear(ParallelLinear):
    """A linear layer with inputs split over `group`: [b, s, i/t] -> [b, s, o].

    The products of all ranks are summed; every rank holds the full bias and adds it after the sum.

    input_is_parallel: False takes the unsplit [b, s, i] and selects this rank's columns of it.
    skip_bias_add: return (output, bias), for a caller that adds the bias in another kernel.
    sequence_parallel: return [b, s/t, o], this rank's positions of the sum. The gradient of the
    bias is then a sum over these positions only, and the bias is marked as partial
    (`parameters.partial_kind`).
    fp8: as ColumnParallelLinear's.

    Raises ValueError if in_features is not divisible by the number of ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        fp8: Fp8Operands | None = None,
        init: Init = WEIGHTS,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group, self.skip_bias_add = group, skip_bias_add
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self.fp8 = fp8
        self.in_features, self.out_features = in_features, out_features
        own = local_range(in_features, parts=group.size, index=group.rank)
        self.weight = shard_parameter(
            Shard((out_features, in_features), {1: (own,)}), init=init, dtype=dtype, device=device
        )
        partial = "tp" if sequence_parallel and group.size > 1 else ""
        self.bias = (
            shard_parameter(Shard((out_features,)), init=ZEROS, partial=partial, dtype=dtype, device=device)
            if bias
            else None
        )

    def forward(self, x: Tensor, *, bias_gradient: bool = True) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [b, s, i/t], or [b, s, i] without input_is_parallel -> [b, s, o].

        [b, s/t, o] with sequence_parallel; a pair (output, bias) with skip_bias_add. bias_gradient:
        as ColumnParallelLinear's.
        """
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.group)
        bias = self.bias if self.bias is None or bias_gradient else self.bias.detach()
        if self.group.size == 1 and not self.skip_bias_add:
            return adapted(self.lora, partial(self._product, x, group=ALONE), x, self.weight, bias)
        output = adapted(self.lora, lambda none: self._summed(self._product(x, none, group=ALONE)), x, self.weight)
        if self.skip_bias_add:
            return output, self.bias
        return output if bias is None else output.add_(bias)

    def _summed(self, partial: Tensor) -> Tensor:
        # [b, s, o], one rank's summand -> the sum, [b, s/t, o] or [b, s, o]
        if self.sequence_parallel:
            return scatter_sequence_sum(partial, self.group)
        return reduce_from_region(partial, self.group, owned=True)

    def extra_repr(self) -> str:
        local = f"{self.weight.shape[1]} of {self.in_features} -> {self.out_features}"
        return f"{local}, bias={self.bias is not None}, t={self.group.size}"


def _checked_parts(out_features: int, stride: int, parts: Sequence[int] | None) -> tuple[int, ...]:
    if parts is None:
        return (local_size(out_features, parts=stride),) * stride
    if stride != 1 or sum(parts) != out_features:
        raise ValueError(f"parts {tuple(parts)} must sum to {out_features}, and stride stay 1")
    return tuple(parts)


class LocalLinear(ParallelLinear):
    """x [.., i] -> x W^T with this rank's rows of W, all of them or some; nothing is sent.

    For a full weight on every rank, or where the caller exchanges inputs and their gradients.
    weight: made by `ShardContext.parameter`, which marks its gradient if it is a partial sum. fp8:
    as ColumnParallelLinear's.
    """

    def __init__(self, weight: nn.Parameter, *, fp8: Fp8Operands | None = None) -> None:
        super().__init__()
        self.weight, self.fp8 = weight, fp8

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, in_features] -> [b, s, this rank's out_features]."""
        return adapted(self.lora, partial(self._product, x, group=ALONE), x, self.weight)

    def extra_repr(self) -> str:
        outputs, inputs = shard_of(self.weight).shape
        return f"{inputs} -> {len(self.weight)} of {outputs}"


class Factor(ParallelLinear):
    """A factor of an adapter, x W^T. group: the ranks that have other rows of W, over which dX is summed
    as a column-parallel layer's. sums: those with other columns, over which the result is."""

    def __init__(
        self, weight: nn.Parameter, *, group: Group = ALONE, sums: Group = ALONE, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.fp8 = weight, None
        self.group, self.sums, self.sequence_parallel = group, sums, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, in_features] -> [b, s, this rank's out_features]. Under sequence parallelism x is
        [b, s/t, in_features] of a factor with `group`, the result one with `sums`."""
        result = self._product(x, None, group=self.group, sequence_parallel=self.sequence_parallel)
        if self.sequence_parallel:
            return scatter_sequence_sum(result, self.sums)
        return reduce_from_region(result, self.sums, owned=True)

    def extra_repr(self) -> str:
        return f"{' x '.join(map(str, self.weight.shape))}"


class ReplicatedLinear(nn.Module):
    """x [.., i] -> x W^T + b [.., o], with unsharded parameters on every rank."""

    lora: Adapters | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias, self.lora = weight, bias, None

    def forward(self, x: Tensor) -> Tensor:
        """x [.., in_features] -> [.., out_features], with the bias added; no communication."""
        return adapted(self.lora, partial(F.linear, x, self.weight), x, self.weight, self.bias)


def summed_bias(linear: nn.Module, kernels: KernelBackend, activation: Activation | None = None) -> Tensor | None:
    """The bias of a linear layer of 1d, if kernels that read its output's gradient, such as this
    activation's, give it its own; else None."""
    has_output = isinstance(linear, RowParallelLinear) or (
        isinstance(linear, ColumnParallelLinear) and not linear.gather_output
    )
    if not has_output or linear.bias is None or not torch.is_grad_enabled():
        return None
    assert isinstance(linear.bias, Tensor)
    is_summed = linear.bias.requires_grad and kernels.sums_biases(activation)
    return linear.bias if is_summed else None


def column_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group,
    sequence_parallel: bool = False,
    overlaps: bool = False,
    fp8: Fp8Operands | None = None,
) -> Tensor:
    """x [b, s, i], equal on every rank, by weight [o/t, i] -> [b, s, o/t] in the dtype of x;
    backward sums dX.

    sequence_parallel: x is this rank's [b, s/t, i], and so is dX. overlaps: as
    ColumnParallelLinear's. fp8: casts the operands, which are then multiplied in fp8. For a group
    of one it is F.linear, without fp8, deferral or a weight in fewer bits.
    """
    if group.size == 1 and fp8 is None and _is_autograds(weight):
        return F.linear(x, weight, bias)
    products: Products = PlainProducts() if fp8 is None else fp8
    if (stored := stored_of(weight)) is not None:
        products = StoredProducts(stored)
    return _ColumnProduct.apply(
        x,
        weight,
        bias,
        products,
        group,
        sequence_parallel and group.size > 1,
        overlaps and fp8 is None,
        torch.is_grad_enabled(),
    )


def _is_autograds(weight: Tensor) -> bool:
    """Whether autograd, or a compiler, may compute dW."""
    if deferred_wgrad_of(weight) is not None or stored_of(weight) is not None:
        return False
    return sink_of(weight) is None or bool(torch.compiler.is_compiling())


def save_operands(ctx: Any, x: Tensor, weight: Tensor) -> None:
    """Save what the backward of X W^T needs: X for dW, W for dX; if one of them needs no gradient,
    the other is not saved. ctx: that of a function whose first two arguments are X and W."""
    for_dx, for_dw = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if for_dw else None, weight if for_dx else None)


class Products(Protocol):
    """The three matrix products of a linear layer, in any format of the operands."""

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool, noted: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """X W^T + b, [b, s, i] by [o, i] -> [b, s, o], and with `keep` the tensors of X for
        `weight_gradient`. noted: in training, when operands count for later scales."""

    def operand(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tensors for `weight_gradient` of an X that was gathered again."""

    def gradient(self, rows: Tensor, *, for_dw: bool) -> tuple[Any, Any]:
        """dY [m, o] as `input_gradient` takes it, and as `weight_gradient` does; a deferred dW
        keeps only the latter. for_dw: whether dW will be computed."""

    def input_gradient(self, dy: Any, weight: Tensor) -> Tensor:
        """dX [m, i] = dY W."""

    def weight_gradient(self, dy: Any, kept: Sequence[Tensor]) -> Tensor:
        """dW [o, i] = dY^T X."""


class PlainProducts:
    """Products of operands that are not cast."""

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool, noted: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See Products."""
        return F.linear(x, weight, bias), (x,) if keep else ()

    def operand(self, x: Tensor) -> tuple[Tensor, ...]:
        """See Products."""
        return (x,)

    def gradient(self, rows: Tensor, *, for_dw: bool) -> tuple[Tensor, Tensor]:
        """See Products."""
        return rows, rows

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """See Products."""
        return dy @ weight

    def weight_gradient(self, dy: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """See Products."""
        return dy.T @ kept[0].flatten(0, -2)


class StoredProducts(PlainProducts):
    """Products by a frozen weight that is made of its stored bits for each of them."""

    def __init__(self, stored: StoredWeight) -> None:
        self.stored = stored

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool, noted: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See Products."""
        return super().output(x, self.stored.whole(), bias, keep=keep, noted=noted)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """See Products."""
        return super().input_gradient(dy, self.stored.whole())


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
        group: Group,
        split: bool,
        overlaps: bool,
        is_training: bool,
    ) -> Tensor:
        ctx.products, ctx.group, ctx.split = products, group, split
        ctx.deferred = deferred_wgrad_of(weight)
        ctx.leaf = weight if ctx.deferred else None
        is_plain = isinstance(products, PlainProducts) and ctx.deferred is None
        ctx.sink = sink_of(weight) if is_plain else None
        for_dx, for_dw = ctx.needs_input_grad[:2]
        # [b, s/t, i] -> [b, s, i] -> [b, s, o/t]
        kept: tuple[Tensor, ...] = ()
        if split and overlaps and overlapped_parts(*x.shape[:2]) == 2:
            y = _product_in_halves(x, weight, bias, group)
        else:
            whole = group.all_gather(x, SEQUENCE) if split else x
            keep = for_dw and not split
            y, kept = products.output(whole, weight, bias, keep=keep, noted=is_training)
        ctx.save_for_backward(weight if for_dx else None, x if for_dw and split else None, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, shard, *kept = ctx.saved_tensors
        products, group, deferred = ctx.products, ctx.group, ctx.deferred
        for_dw = shard is not None or bool(kept)
        gather: Callable[[], Pending] | None = None
        if shard is not None:
            gather = partial(group.start_all_gather, shard.detach(), SEQUENCE)
        arriving = gather() if gather is not None and deferred is None else None
        # [b, s, o/t] -> [b*s, o/t]
        rows = grad.flatten(0, -2)
        (dy, dy_for_dw), dx, dw = products.gradient(rows, for_dw=for_dw), None, None
        if weight is not None:
            shape = (*grad.shape[:-1], -1)
            # no reference is held here to the summand, which may be freed before dW is computed
            if ctx.split:
                dx = group.start_reduce_scatter(products.input_gradient(dy, weight).view(shape), SEQUENCE)
            else:
                dx = group.start_all_reduce(products.input_gradient(dy, weight).view(shape))
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        if for_dw and ctx.sink is not None:
            (whole,) = kept if arriving is None else (arriving.wait(),)
            ctx.sink.add_product(rows, whole.flatten(0, -2))
        elif for_dw and deferred is None:
            dw = _weight_gradient(products, dy_for_dw, kept, arriving)
        elif for_dw:  # kept tensors themselves and ctx would keep the graph, and all it ends in
            values = [tensor.detach() for tensor in kept]
            deferred.add(ctx.leaf, lambda: _weight_gradient(products, dy_for_dw, values, gather and gather()))
        return None if dx is None else dx.wait(), dw, db, *[None] * 5


def _product_in_halves(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """The product of the gathered [b, s, i], [b, s, o/t], of halves of the samples, or of each
    rank's positions: the second arrives while the first is multiplied."""
    (b, n, _), t = x.shape, group.size
    y, transposed = x.new_empty(b, t * n, weight.shape[0]), weight.t()
    if b % 2 == 0:
        arriving = [group.start_all_gather(half, SEQUENCE) for half in x.chunk(2)]
        for half, place in zip(arriving, y.view(2, -1, weight.shape[0]), strict=True):
            _multiply(half.wait().flatten(0, 1), transposed, bias, out=place)
        return y
    halves = [half.contiguous()[None] for half in x.chunk(2, dim=1)]
    arriving = [group.start_all_gather(half, 0) for half in halves]
    for at, half in enumerate(arriving):
        # [t, b, n/2, i] -> [t, n/2, i] of each sample, into every other block of its rows
        for rows, whole in zip(half.wait().unbind(1), y, strict=True):
            place = whole.view(t, 2, n // 2, -1)[:, at]
            _multiply(rows, transposed.expand(t, -1, -1), bias, out=place)
    return y


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    """A B + bias of matrices or of batches of them, into `out`."""
    if bias is None:
        torch.matmul(a, b, out=out)
    elif a.dim() == 2:
        torch.addmm(bias, a, b, out=out)
    else:
        torch.baddbmm(bias, a, b, out=out)


def _weight_gradient(products: Products, dy: Any, kept: Sequence[Tensor], arriving: Pending | None) -> Tensor:
    """[o/t, b*s] x [b*s, i] -> [o/t, i], from X as saved, or gathered."""
    operand = kept if arriving is None else products.operand(arriving.wait())
    return products.weight_gradient(dy, operand)
