"""The elementwise operations and fused kernels of a layer, which a device implements: attention,
norms, dropout, activations, rotary positions, products in fp8.

A layer decides what is attended to and how it is scaled; a `KernelBackend` computes it and decides
what is saved for backward. The default calls torch's kernels, which depend on device and dtype. To
use others (a FlashAttention build, a simulated GPU), override the methods in a subclass and pass an
instance to the layers.

Attention without dropout is torch's fused kernel, which keeps no scores; a window, slopes and a
bias become a mask of q x s elements. With dropout it is computed step by step, since the mask of
torch's kernel would depend on the layout; backward then keeps probabilities, mask and dropped
probabilities: in 16 bit 2 + 1 + 2 bytes an element of [b, a/t, s, s], the 5as/h term of arXiv
2205.05198, equation 1.

RMSNorm on a CPU: torch computes it as separate float32 operations and keeps all of their results,
8 bytes more an element for 16-bit inputs, so that `recomputing_rms_norm` is used there. With
u = x / rms and g = dY weight: dX = (g - u mean(g u)) / rms, d weight = sum over rows of dY u. It
keeps x and one number a row. By hand, weight 1, eps 0: (1, 7) -> (0.2, 1.4).

Letters: b batch, a heads, k key-value heads, q queries, s keys, d head size, h hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.train.kernels.activation import Activation, activated
from mpctl.train.kernels.adamw import AdamWStep, torch_adamw
from mpctl.train.kernels.attention import AttentionVariant, equally_wide, lower_right, repeated
from mpctl.train.kernels.counter_rng import DropoutMask, block_elements, drop
from mpctl.train.kernels.fp8 import Fp8Cast, Fp8Matrix, cast_matrix, note_largest, scaled_product
from mpctl.train.kernels.partial_attention import PartialKernel, attend_tail, chosen_kernel, kernel_name
from mpctl.train.kernels.rotary import rotated
from mpctl.train.kernels.routing import summed_rows, weighted_gradients, weighted_rows
from mpctl.train.kernels.rows import add_rows


class KernelBackend:
    """torch's own kernels; subclass it to replace one of them."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def attention(self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> Tensor:
        """softmax(scale Q K^T + bias) V with dropout of the softmax's result: query [b, a, q, d],
        key [b, k, s, d], value [b, k, s, e], k dividing a -> [b, a, q, e]. `variant` says which
        keys count and how scores are changed."""
        if variant.dropout is not None:
            return self._step_by_step(query, key, value, variant, variant.dropout)
        if variant.is_plain:
            # Whole squares from position 0, or the last rows of a longer prefix; one row sees all.
            rows, is_first = variant.rows, variant.is_causal and variant.rows.start == 0
            is_tail = variant.is_causal and not is_first and len(rows) > 1
            kernel = self.partial_kernel(query, key, value, variant.scale) if is_tail else None
            if kernel is not None:
                return attend_tail(query, key, value, kernel)
            lower = lower_right(len(rows), key.shape[-2]) if is_tail else None
            return self.scaled_dot_product(
                query, key, value, lower, is_causal=is_first, scale=variant.scale, enable_gqa=True
            )
        key, value = repeated(query, key, value)
        seen, bias = variant.seen(key), variant.added(query, key)
        if bias is not None:
            bias = bias.to(query.dtype)
            seen = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
        return self.scaled_dot_product(query, key, value, seen, scale=variant.scale)

    def attention_name(self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> str:
        """Name the kernel that computes `attention` of these."""
        if variant.dropout is not None:
            return kernel_name(0, query.device)
        is_causal, is_grouped, seen = variant.is_causal, query.shape[1] != key.shape[1], None
        if not variant.is_plain:  # one mask of pairs, which stands for all
            seen = query.new_zeros((query.shape[-2], key.shape[-2]))
            is_causal = is_grouped = False
            key, value = repeated(query, key, value)
        if query.device.type == "cpu":
            query, key, value = equally_wide(query, key, value)
        number = torch._fused_sdp_choice(query, key, value, seen, 0.0, is_causal, enable_gqa=is_grouped)
        return kernel_name(number, query.device)

    def _step_by_step(
        self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, dropout: DropoutMask
    ) -> Tensor:
        key, value = repeated(query, key, value)
        # [b, a/t, q, d] x [b, a/t, d, s] -> [b, a/t, q, s]
        scale = 1 / math.sqrt(query.shape[-1]) if variant.scale is None else variant.scale
        scores = query.mul(scale) @ key.transpose(-1, -2)
        bias = variant.added(query, key)
        scores = scores if bias is None else scores.add_(bias)
        seen = variant.seen(key)
        if seen is not None:
            # The lowest number, not -inf: a row that sees nothing must not become nan.
            scores = scores.masked_fill_(~seen, torch.finfo(scores.dtype).min)
        probabilities = scores.softmax(-1)
        if variant.mask is not None and seen is not None:
            probabilities = probabilities.masked_fill(~seen, 0.0)
        return self.dropout(probabilities, dropout) @ value

    def keeps_pairs(self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> bool:
        """Whether `attention` of these would save intermediate tensors of q x s elements for
        backward, which selective recomputation avoids."""
        return variant.dropout is not None or variant.forms_pairs

    def partial_kernel(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> PartialKernel | None:
        """The kernel that `scaled_dot_product` would run, where it also returns log-sums, so that
        parts of the keys can be computed apart; else None."""
        return chosen_kernel(query, key, value, scale)

    def scaled_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(scale Q K^T + mask) V: query [b, a, q, d], key [b, k, s, d], value [b, k, s, e]
        -> [b, a, q, e]; the implementation of `attention` without dropout.

        The arguments are those of torch's scaled_dot_product_attention: mask is boolean (True may
        attend), added to the scores, or a `CausalBias`; scale is 1/sqrt(d) by default; enable_gqa
        allows k < a.
        """
        width, columns = query.shape[-1], value.shape[-1]
        if width != columns and query.device.type == "cpu":  # its fused kernel has one head size
            scale = 1 / math.sqrt(width) if scale is None else scale
            query, key, value = equally_wide(query, key, value)
            return F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )[..., :columns]
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias (arXiv 1607.06450): x [.., h], weight and
        bias [h] -> [.., h]."""
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467, equation 4): x [.., h], weight [h]
        -> [.., h], computed in float32 for 16-bit inputs."""
        if x.device.type == "cpu":
            return recomputing_rms_norm(x, weight, eps)
        return F.rms_norm(x, weight.shape, weight, eps)

    def residual_norm(
        self,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        centred: bool,
        branch_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [.., h], plus `branch` if it is given, and its norm: LayerNorm's where it is centred,
        else RMSNorm's. branch_bias: a bias that the branch contains and that gets its gradient
        here, where `sums_branch`."""
        total = x if branch is None else x + branch
        if not centred:
            return total, self.rms_norm(total, weight, eps)
        assert bias is not None
        return total, self.layer_norm(total, weight, bias, eps)

    def sums_biases(self, activation: Activation | None = None) -> bool:
        """Whether the gradients of biases are sums that other kernels leave behind: those of
        `split_heads`, and of this activation."""
        return False

    def sums_branch(self, bias: Tensor) -> bool:
        """Whether `residual_norm` and `dropout_add` give such a bias of a branch its gradient."""
        return False

    def summed_activation(self, up: Tensor, name: Activation, bias: Tensor) -> Tensor:
        """The activation of `up`, which contains `bias` [f]; backward also gives the bias its
        gradient. Only where `sums_biases`."""
        raise NotImplementedError

    def split_heads(
        self, qkv: Tensor, widths: tuple[int, int, int], head_size: int, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[b, s, sum of widths], which contains `bias` -> queries, keys and values [b, n, s, d];
        backward also gives the bias its gradient. Only where `sums_biases`."""
        raise NotImplementedError

    def dropout(self, x: Tensor, mask: DropoutMask) -> Tensor:
        """x [b, s, h] or [b, a, s, keys] with elements that the mask drops set to 0, the rest
        divided by 1 - p."""
        return drop(x, mask)

    def dropout_add(self, x: Tensor, mask: DropoutMask, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        """residual + dropout(x): the end of a residual branch, [b, s, h]. bias: one that x contains
        and that gets its gradient here, where `sums_branch`."""
        return residual + self.dropout(x, mask)

    def activation(self, up: Tensor, name: Activation) -> Tensor:
        """The activation of an MLP: [.., f] -> [.., f], of a gated activation [.., 2f] =
        [gate | up] -> [.., f]. Saves only its argument for backward."""
        return activated(up, name)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [b, a, s, d] turned by rotary positions: cos and sin [s, r/2] or [b, 1, s, r/2] of the
        first r columns, which `Rotary.table` made. Saves only the table for backward."""
        return rotated(x, cos, sin)

    def host_counts(self, counts: Tensor, rows: int) -> list[list[int]]:
        """Numbers of rows by rank and expert, int64 [n, E], on the host, which waits for them.
        rows: the sum of one rank's, for a device without values."""
        numbers: list[list[int]] = counts.tolist()
        return numbers

    def summed_rows(self, rows: Tensor, places: Tensor) -> Tensor:
        """See routing.RowKernels."""
        return summed_rows(rows, places)

    def weighted_rows(self, rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """See routing.RowKernels."""
        return weighted_rows(rows, weights, places)

    def weighted_gradients(
        self, grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See routing.RowKernels."""
        return weighted_gradients(grad, rows, weights, places, targets)

    def row_maximum(self, logits: Tensor, *, words: int) -> Tensor:
        """Maximum of each row of logits, [n, v] -> [n], over its first `words` columns, in float32
        or float64; -inf for 0 words. A cross entropy's first pass, not differentiable, as the two
        below; all are computed in that type, a block of rows at a time, so that no copy of the
        logits in it exists."""
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        peak, own = logits.new_full(logits.shape[:1], -torch.inf, dtype=dtype), logits[:, :words]
        for rows in _row_blocks(own):  # in 16 bits amax takes twice as long on a CPU
            peak[rows] = own[rows].to(dtype).amax(1)
        return peak

    def own_sums(self, logits: Tensor, column: Tensor, peak: Tensor, *, words: int) -> tuple[Tensor, Tensor]:
        """z_column - peak and sum_j exp(z_j - peak) of each row's first `words` columns, 2 x [n].
        column [n]: the target's, -1 without one, which makes the first 0."""
        target, total = torch.zeros_like(peak), torch.zeros_like(peak)
        own = logits[:, :words]
        for rows in _row_blocks(own):
            shifted = torch.sub(own[rows], peak[rows, None])
            hit = shifted.gather(1, column[rows, None].clamp(min=0))[:, 0]
            target[rows] = hit.masked_fill_(column[rows] < 0, 0.0)
            total[rows] = shifted.exp_().sum(1)
        return target, total

    def logits_gradient(
        self, logits: Tensor, column: Tensor, peak: Tensor, share: Tensor, hit: Tensor, *, words: int, overwrite: bool
    ) -> Tensor:
        """[n, v]: exp(z - peak) share, and `hit` more in the row's column, in the first `words`
        columns, and 0 in the others; share, hit: [n]. overwrite: in the memory of the logits."""
        result = logits if overwrite else torch.empty_like(logits)
        result[:, words:].zero_()
        own, given = result[:, :words], logits[:, :words]
        for rows in _row_blocks(own):
            # softmax, times the incoming gradient, then less what the target has of it
            out = own[rows] if own.dtype == peak.dtype else None
            work = torch.sub(given[rows], peak[rows, None], out=out).exp_()
            work.mul_(share[rows, None])
            place = column[rows, None].clamp(min=0)
            work.scatter_add_(1, place, hit[rows, None].to(work.dtype))
            if out is None:
                own[rows] = work
        return result

    def fp8_cast(
        self,
        matrix: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        *,
        rows: bool = True,
        columns: bool = False,
        amax: Tensor | None = None,
        into: Fp8Cast | None = None,
    ) -> Fp8Cast:
        """`matrix` [m, n] times `scale` (a power of two, float32, of no dimensions) in an fp8
        dtype: by rows, by columns or both. amax: a number, float32, that is raised to the matrix's
        largest absolute value. into: memory of both layouts that is filled and returned."""
        if amax is not None:
            note_largest(matrix, amax)
        if into is None:
            return cast_matrix(matrix, scale, dtype, rows=rows, columns=columns)
        assert into.by_rows is not None and into.by_columns is not None
        cast = cast_matrix(matrix, scale, dtype).by_rows
        assert cast is not None
        into.by_rows.copy_(cast)
        into.by_columns.copy_(cast.t())
        return into

    def fp8_product(
        self, a: Fp8Matrix, b: Fp8Matrix, *, out: torch.dtype, bias: Tensor | None = None, fast: bool = False
    ) -> Tensor:
        """A B^T + bias [n] in the dtype `out`: a [m, k] and b [n, k] of fp8 -> [m, n]. fast: sum
        in fewer bits where the device can."""
        return scaled_product(a, b, out=out, bias=bias, fast=fast)

    def adds_products(self, operands: torch.dtype, sums: torch.dtype) -> bool:
        """Whether a product of such operands adds to a matrix of another dtype by itself."""
        return False

    def add_product(self, dy: Tensor, x: Tensor, out: Tensor, *, adds: bool) -> None:
        """out [o, i] = dY^T X, and what it was before where `adds`: dY [m, o], X [m, i]."""
        if out.dtype == x.dtype:  # no product is made beside it
            if adds:
                torch.addmm(out, dy.T, x, out=out)
            else:
                torch.mm(dy.T, x, out=out)
        elif adds:
            out.add_(dy.T @ x)
        else:
            out.copy_(dy.T @ x)

    def add_rows(self, rows: Tensor, vectors: Tensor, out: Tensor) -> None:
        """Add vectors [m, h] to the rows [m] of out [n, h], in an order that repeats: a row may
        occur several times."""
        add_rows(rows, vectors, out)

    def adamw(self, step: AdamWStep) -> bool:
        """Make an update; returns whether the copies were written too."""
        torch_adamw(step)
        return False


TORCH_BACKEND = KernelBackend()


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    count, width = logits.shape
    step = max(1, block_elements(logits.device) // max(1, width))
    return (slice(start, start + step) for start in range(0, count if width else 0, step))


def recomputing_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm that keeps x and one number a row for backward, as a GPU's fused kernel does."""
    result: Tensor = _RMSNormFunction.apply(x, weight, eps)
    return result


class _RMSNormFunction(torch.autograd.Function):
    """All in float32 (float64 for float64), rounded once at the end. Inputs are converted first: a
    product of 16 and 32 bits takes a CPU several times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        # [b, s, h] -> [b, s, 1]
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        scale, wide = weight.to(inverse.dtype), grad.to(inverse.dtype)
        unit, dx = x.to(inverse.dtype) * inverse, None
        along = wide * unit
        dw = along.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            # [b, s, h] x [h] -> [b, s, 1]
            mean = (along @ scale)[..., None].div_(x.shape[-1])
            dx = torch.mul(wide, scale, out=along).addcmul_(unit, mean, value=-1).mul_(inverse)
        return None if dx is None else dx.to(x.dtype), dw, None
