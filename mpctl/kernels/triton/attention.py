"""Attention of any variant as one kernel forward and two backward, which save no scores.

FlashAttention-2 (arXiv 2307.08691) with the dropout mask computed from coordinates, a window,
ALiBi's slopes, a mask and a bias inside the kernel (jit/attention.py).
Saved for backward are the arguments, the result, and 4 bytes a row of scores. A learned bias costs
a third kernel in backward, which sums over the samples that share it.

Sizes of blocks, by kernel and head size: of causal attention with dropout, blocks fit the 99 KiB of
shared memory that a program has on compute capability 8.6 and 8.9; the products of 16 bits run on
tensor cores of 9.0 (tests/kernels/triton/test_compile.py), and ptxas spills at most 40 bytes a
thread there. Which sizes are the fastest was never measured on a device.

Letters: b batch, a heads, k key-value heads, q queries, s keys, d head size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpctl.kernels.attention import AttentionVariant, equally_wide
from mpctl.kernels.counter_rng import DropoutMask, as_int32
from mpctl.kernels.triton import define_gradient, define_operation
from mpctl.operators import fused_attention as fused_attention_rule

ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? slopes,"
    " Tensor? seed, SymInt number, Tensor? samples, SymInt[] places, bool is_causal,"
    " SymInt window, float p, float scale"
)
Launch = dict[str, Any]


class _Call(NamedTuple):
    """The arguments of the operation. seed or number: the key of the dropout mask; samples None: no
    dropout. places: the first head and the first row, by global number. window: 0 for all."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    seed: Tensor | None
    number: int
    samples: Tensor | None
    places: list[int]
    is_causal: bool
    window: int
    p: float
    scale: float

    def dense(self) -> _Call:
        """The call with tensors whose last dimension is contiguous."""
        return self._replace(query=dense(self.query), key=dense(self.key), value=dense(self.value))


def refusal(query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> str | None:
    """Why the kernel cannot compute this, None where it can."""
    widest = max(query.shape[-1], value.shape[-1])
    refused = fused_attention_rule.refusal(query.element_size(), widest)
    if refused is not None:
        return refused.reason
    dropout = variant.dropout
    if dropout is not None and not _are_in_order(dropout, variant.rows, key.shape[-2]):
        return "dropout at scattered heads, rows or keys"
    return None


def _are_in_order(dropout: DropoutMask, rows: range, keys: int) -> bool:
    heads = dropout.heads
    follow = isinstance(heads, range) and heads.step == 1
    return follow and dropout.rows == rows and dropout.columns == range(keys)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> Tensor:
    """query [b, a, q, d], key [b, k, s, d], value [b, k, s, e] -> [b, a, q, e], laid out
    [b, q, a, e]. The kernels have one head size, so that the smaller of d and e is padded."""
    width, columns = query.shape[-1], value.shape[-1]
    if width != columns:
        variant = replace(variant, scale=variant.scale or 1 / math.sqrt(width))
        return fused_attention(*equally_wide(query, key, value), variant)[..., :columns]
    dropout, heads = variant.dropout, None
    seed, number = None, 0
    if dropout is not None:
        heads = dropout.heads
        seed = dropout.key if isinstance(dropout.key, Tensor) else None
        number = 0 if isinstance(dropout.key, Tensor) else as_int32(dropout.key)
    return _attention(
        query, key, value, variant.mask, variant.bias, variant.slopes, seed, number,
        None if dropout is None else dropout.samples,
        [heads.start if isinstance(heads, range) else 0, variant.rows.start],
        variant.is_causal, variant.window or 0, 0.0 if dropout is None else dropout.p,
        1 / math.sqrt(width) if variant.scale is None else variant.scale,
    )[0]  # fmt: skip


def dense(x: Tensor) -> Tensor:
    """x, copied if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_rows(x: Tensor) -> Tensor:
    """Space for a tensor [b, a, s, d] laid out [b, s, a, d], as the next product wants it."""
    b, a, s, d = x.shape
    return x.new_empty(b, s, a, d).transpose(1, 2)


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def _pairs(x: Tensor | None) -> tuple[Any, Any]:
    """A mask or a bias and its strides, 0 along samples or heads that share it."""
    if x is None:
        return None, None
    outer = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)][:2]
    return x, (*outer, *x.stride()[2:])


def _tuples(call: _Call) -> tuple[Any, ...]:
    """`variant` and `rng` of the kernels (jit/attention.py)."""
    head_start, row_start = call.places
    variant = (*_pairs(call.mask), *_pairs(call.bias), call.slopes, row_start)
    rng = None
    if call.samples is not None:
        rng = (call.seed, call.number, call.samples, head_start)
    return variant, rng


def launch(call: _Call, kernel: str) -> Launch:
    """The constants that a kernel is compiled with."""
    import triton.language as tl

    query, keep = call.query, 1 - call.p
    is_double = query.dtype == torch.float64
    is_exact = is_double or torch.get_float32_matmul_precision() == "highest"
    return {
        "GROUP": query.shape[1] // call.key.shape[1],
        "SCALE": call.scale,
        "CAUSAL": call.is_causal,
        "WINDOW": call.window,
        "THRESHOLD": min(round(call.p * 2**32) - 2**31, 2**31 - 1),
        "KEEP_SCALE": 1 / keep,
        "WIDE": tl.float64 if is_double else tl.float32,
        "PRECISION": "ieee" if is_exact else "tf32",
        **constants(kernel, query.shape[-1], query.element_size()),
    }


def _sizes(call: _Call) -> tuple[int, int, int]:
    return call.query.shape[1], call.query.shape[2], call.key.shape[2]


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    import triton

    from mpctl.kernels.triton.jit.attention import attention_kernel

    call = _Call(*arguments).dense()
    out, sums = _fake(*arguments)
    if out.numel():
        how = launch(call, "forward")
        grid = (triton.cdiv(call.query.shape[2], how["BLOCK_Q"]), sums.shape[0] * sums.shape[1])
        given = [part for x in (*call[:3], out) for part in (x, _strides(x))]
        attention_kernel[grid](*given, sums, *_tuples(call), *_sizes(call), **how)
    return out, sums


def _fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _by_rows(query), query.new_empty(query.shape[:3], dtype=_wide(query))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _run_backward(
    grad: Tensor, out: Tensor, sums: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    import triton

    from mpctl.kernels.triton.jit import attention as kernels

    call, grad = _Call(*arguments).dense(), dense(grad)
    results = _fake_backward(grad, out, sums, *arguments)
    dquery, dkey, dvalue, deltas = results
    query, key, value = ((x, _strides(x)) for x in call[:3])
    of_grad, common = (grad, _strides(grad)), (*_tuples(call), *_sizes(call))
    if dquery.numel():
        how = launch(call, "query gradient")
        grid = (triton.cdiv(query[0].shape[2], how["BLOCK_Q"]), sums.shape[0] * sums.shape[1])
        kernels.query_gradient_kernel[grid](
            *query, *key, *value, out, _strides(out), *of_grad, dquery, _strides(dquery),
            sums, deltas, *common, **how,
        )  # fmt: skip
    if dkey.numel():
        how = launch(call, "key gradient")
        grid = (triton.cdiv(dkey.shape[2], how["BLOCK_K"]), dkey.shape[0] * dkey.shape[1])
        kernels.key_gradient_kernel[grid](
            *query, *key, *value, *of_grad, dkey, _strides(dkey), dvalue, _strides(dvalue),
            sums, deltas, *common, **how,
        )  # fmt: skip
    return results


def _fake_backward(
    grad: Tensor, out: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _by_rows(query), _by_rows(key), _by_rows(value), torch.empty_like(sums)


def _run_bias_gradient(grad: Tensor, sums: Tensor, deltas: Tensor, *arguments: Any) -> Tensor:
    import triton

    from mpctl.kernels.triton.jit.attention import bias_gradient_kernel

    call, grad = _Call(*arguments).dense(), dense(grad)
    dbias = _fake_bias_gradient(grad, sums, deltas, *arguments)
    if dbias.numel():
        samples, heads, queries, keys = dbias.shape
        how = launch(call, "bias gradient")
        grid = (
            triton.cdiv(queries, how["BLOCK_Q"]), triton.cdiv(keys, how["BLOCK_K"]),
            samples * heads,
        )  # fmt: skip
        given = [part for x in (*call[:3], grad) for part in (x, _strides(x))]
        shared = sums.shape[0] // samples, sums.shape[1] // heads
        bias_gradient_kernel[grid](
            *given, dbias, dbias.stride(), sums, deltas, *_tuples(call), *_sizes(call), *shared,
            heads, **how,
        )  # fmt: skip
    return dbias


def _fake_bias_gradient(grad: Tensor, sums: Tensor, deltas: Tensor, *arguments: Any) -> Tensor:
    bias = _Call(*arguments).bias
    assert bias is not None
    return bias.new_empty(bias.shape)


_attention = define_operation(f"attention({ARGUMENTS}) -> (Tensor, Tensor)", _run, _fake)
_attention_backward = define_operation(
    f"attention_backward(Tensor grad, Tensor out, Tensor sums, {ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_bias_gradient = define_operation(
    f"attention_bias_gradient(Tensor grad, Tensor sums, Tensor deltas, {ARGUMENTS}) -> Tensor",
    _run_bias_gradient,
    _fake_bias_gradient,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = _Call(*inputs)
    ctx.set_materialize_grads(False)  # the sums have none
    ctx.save_for_backward(*call[:7], call.samples, *output)
    ctx.rest = (call.number, call.places, call.is_causal, call.window, call.p, call.scale)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    *tensors, samples, out, sums = ctx.saved_tensors
    number, *rest = ctx.rest
    call = _Call._make((*tensors, number, samples, *rest))
    grads: list[Tensor | None] = [None] * len(call)
    if grad is not None:
        *grads[:3], deltas = _attention_backward(grad, out, sums, *call)
        if ctx.needs_input_grad[4]:
            grads[4] = _bias_gradient(grad, sums, deltas, *call)
    return tuple(grads)


define_gradient("attention", _backward, _setup)


class Tile(NamedTuple):
    """Rows and keys of a block, warps of a program, and how many blocks are loaded ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


# by kernel, then by the largest head size that it is for: of 2 bytes an element
NARROW = {
    "forward": {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 4, 2)},
    "query gradient": {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 4, 2), 256: Tile(32, 32, 8, 1)},
    "key gradient": {64: Tile(64, 128, 8, 2), 128: Tile(64, 64, 4, 2), 256: Tile(32, 32, 8, 1)},
    "bias gradient": {64: Tile(64, 64, 8, 1), 128: Tile(32, 64, 4, 1), 256: Tile(32, 32, 4, 1)},
}
# of 4 bytes and more, whose products take no tensor cores
WIDE = {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 4, 1)}


def tile(kernel: str, head_size: int, element_bytes: int) -> Tile:
    """The tile of one of the four kernels for heads of up to 256."""
    sizes = NARROW[kernel] if element_bytes <= 2 else WIDE
    return next(sizes[most] for most in sizes if head_size <= most)


def constants(kernel: str, head_size: int, element_bytes: int) -> dict[str, Any]:
    """A kernel's block sizes and the compiler's options, by keyword."""
    chosen = tile(kernel, head_size, element_bytes)
    return {
        "D": head_size,
        "BLOCK_D": max(16, 1 << (head_size - 1).bit_length()),
        "BLOCK_Q": chosen.queries,
        "BLOCK_K": chosen.keys,
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
