"""Attention of any variant as one kernel forward and two backward, which save no scores.

FlashAttention-2 (arXiv 2307.08691) with the dropout mask computed from coordinates, a window,
ALiBi's slopes, a mask and a bias inside the kernel (jit/attention.py, jit/attention_gradient.py).
Saved for backward are the arguments, the result, and 4 bytes a row of scores. A learned bias costs
a third kernel in backward, which sums over the samples that share it.

Sizes of blocks are those of attention_tiles.py; a device that none fits has torch's attention.

Letters: b batch, a heads, k key-value heads, q queries, s keys, d head size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpctl.model.operators import fused_attention as fused_attention_rule
from mpctl.train.kernels.attention import AttentionVariant, equally_wide
from mpctl.train.kernels.counter_rng import DropoutMask, as_int32
from mpctl.train.kernels.triton import Gradient, define_operation
from mpctl.train.kernels.triton.attention_tiles import HOPPER, KERNELS, Kernel, ProgramLimits, current_limits, tile
from mpctl.train.kernels.triton.launch import KernelLaunch, Launcher

ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? slopes,"
    " Tensor? seed, SymInt number, Tensor? samples, SymInt[] places, bool is_causal,"
    " SymInt window, float p, float scale"
)


def _kernels() -> ModuleType:
    from mpctl.train.kernels.triton.jit import attention

    return attention


def _gradient_kernels() -> ModuleType:
    from mpctl.train.kernels.triton.jit import attention_gradient

    return attention_gradient


_FORWARD = Launcher(_kernels, "attention_kernel")
_QUERY_GRADIENT = Launcher(_gradient_kernels, "query_gradient_kernel")
_KEY_GRADIENT = Launcher(_gradient_kernels, "key_gradient_kernel")
_BIAS_GRADIENT = Launcher(_gradient_kernels, "bias_gradient_kernel")


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

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> _Call:
        """The call with tensors contiguous in their last dimension."""
        return cls(dense(query), dense(key), dense(value), *rest)

    @property
    def facts(self) -> tuple[Any, ...]:
        """All but the tensors that decides how its kernels are launched."""
        exact = torch.get_float32_matmul_precision()
        return (*self.places, self.is_causal, self.window, self.p, self.scale, exact)


def refusal(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, limits: ProgramLimits = HOPPER
) -> str | None:
    """Return the reason why the kernels cannot compute this on a device of these limits; None if they can."""
    widest, element_bytes = max(query.shape[-1], value.shape[-1]), query.element_size()
    refused = fused_attention_rule.refusal(element_bytes, widest)
    if refused is not None:
        return refused.reason
    pairs = _pair_bytes(variant.mask, variant.bias)
    if any(tile(kernel, widest, element_bytes, limits, pairs) is None for kernel in KERNELS):
        return f"no tile for heads of {widest} fits {limits}"
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
        query,
        key,
        value,
        variant.mask,
        variant.bias,
        variant.slopes,
        seed,
        number,
        None if dropout is None else dropout.samples,
        [heads.start if isinstance(heads, range) else 0, variant.rows.start],
        variant.is_causal,
        variant.window or 0,
        0.0 if dropout is None else dropout.p,
        1 / math.sqrt(width) if variant.scale is None else variant.scale,
    )[0]


def dense(x: Tensor) -> Tensor:
    """x, copied if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_rows(x: Tensor) -> Tensor:
    """Space for a tensor [b, a, s, d] laid out [b, s, a, d], as the next product wants it."""
    b, a, s, d = x.shape
    return x.new_empty(b, s, a, d).transpose(1, 2)


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def _pair_strides(x: Tensor | None) -> tuple[int, ...] | None:
    """The strides of a mask or a bias; 0 along samples or heads that share it."""
    if x is None:
        return None
    strides = zip(x.shape[:2], x.stride()[:2], strict=True)
    return (*(0 if n == 1 else stride for n, stride in strides), *x.stride()[2:])


def _pair_bytes(mask: Tensor | None, bias: Tensor | None) -> int:
    return sum(x.element_size() for x in (mask, bias) if x is not None)


def _constants(call: _Call) -> dict[str, Any]:
    """The constants that every kernel is compiled with, but for its blocks."""
    import triton.language as tl

    head_size = call.query.shape[-1]
    is_double = call.query.dtype == torch.float64
    is_exact = is_double or torch.get_float32_matmul_precision() == "highest"
    return {
        "GROUP": call.query.shape[1] // call.key.shape[1],
        "SCALE": call.scale,
        "CAUSAL": call.is_causal,
        "WINDOW": call.window,
        "THRESHOLD": min(round(call.p * 2**32) - 2**31, 2**31 - 1),
        "KEEP_SCALE": 1 / (1 - call.p),
        "WIDE": tl.float64 if is_double else tl.float32,
        "PRECISION": "ieee" if is_exact else "tf32",
        "D": head_size,
        "BLOCK_D": max(16, 1 << (head_size - 1).bit_length()),
    }


def _prepare(kernel: Kernel, call: _Call, *others: Tensor) -> KernelLaunch:
    """others: the tensors beside those of the call whose strides the kernel takes, in its order;
    the last is written."""
    query, key = call.query, call.key
    pairs = _pair_bytes(call.mask, call.bias)
    chosen = tile(kernel, query.shape[-1], query.element_size(), current_limits(), pairs)
    assert chosen is not None, "refused by `refusal`"
    row_blocks = -(-query.shape[2] // chosen.queries)
    key_blocks = -(-key.shape[2] // chosen.keys)
    shared: tuple[Any, ...] = ()
    if kernel == "key gradient":
        programs = key_blocks * key.shape[0] * key.shape[1]
    elif kernel == "bias gradient":
        samples, heads = others[-1].shape[:2]
        programs = row_blocks * key_blocks * samples * heads
        shared = ((query.shape[0] // samples, query.shape[1] // heads, heads),)
    else:
        programs = row_blocks * query.shape[0] * query.shape[1]
    strides = (
        *(_strides(x) for x in call[:3]),
        _pair_strides(call.mask),
        _pair_strides(call.bias),
        *(x.stride() if kernel == "bias gradient" else _strides(x) for x in others),
    )
    sizes = query.shape[1], query.shape[2], key.shape[2]
    return KernelLaunch(
        (programs,),
        (strides, (call.places[0], call.places[1]), sizes, *shared),
        {**_constants(call), "BLOCK_Q": chosen.queries, "BLOCK_K": chosen.keys},
        {"num_warps": chosen.warps, "num_stages": chosen.stages},
    )


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = _Call.of(*arguments)
    out, sums = _fake(*arguments)
    if out.numel():
        _FORWARD(
            (*call[:7], call.samples, out, sums), call.facts, _prepare, "forward", call, out, varying=(call.number,)
        )
    return out, sums


def _fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _by_rows(query), query.new_empty(query.shape[:3], dtype=_wide(query))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _run_backward(grad: Tensor, out: Tensor, sums: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call, grad = _Call.of(*arguments), dense(grad)
    results = _fake_backward(grad, out, sums, *arguments)
    joined, deltas = results
    dquery, dkey, dvalue = _parts(joined, *call[:3])
    facts = call.facts
    row_numbers = None if call.samples is None else sums.new_empty(sums.shape, dtype=torch.int32)
    if dquery.numel():
        _QUERY_GRADIENT(
            (*call[:7], call.samples, out, grad, dquery, sums, deltas, row_numbers),
            facts,
            _prepare,
            "query gradient",
            call,
            out,
            grad,
            dquery,
            varying=(call.number,),
        )
    if dkey.numel():
        _KEY_GRADIENT(
            (*call[:6], grad, dkey, dvalue, sums, deltas, row_numbers),
            facts,
            _prepare,
            "key gradient",
            call,
            grad,
            dkey,
            dvalue,
        )
    return results


def _fake_backward(
    grad: Tensor, out: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    count = query.numel() + key.numel() + value.numel()
    return query.new_empty(count), torch.empty_like(sums)


def _parts(joined: Tensor, *likes: Tensor) -> tuple[Tensor, ...]:
    """Space in a flat tensor for tensors like these [b, n, s, d], as `_by_rows` lays them out. If
    they have as many rows, their columns lie side by side, as those of one product do."""
    (b, _, s, d), widths = likes[0].shape, [x.shape[1] * x.shape[3] for x in likes]
    if all(x.shape[2:] == (s, d) for x in likes):
        parts = joined.view(b, s, -1).split(widths, dim=-1)
        return tuple(part.unflatten(-1, (-1, d)).transpose(1, 2) for part in parts)
    flat = joined.split([x.numel() for x in likes])
    return tuple(
        part.view(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
        for part, x in zip(flat, likes, strict=True)
    )


def _run_bias_gradient(grad: Tensor, sums: Tensor, deltas: Tensor, *arguments: Any) -> Tensor:
    call, grad = _Call.of(*arguments), dense(grad)
    dbias = _fake_bias_gradient(grad, sums, deltas, *arguments)
    if dbias.numel():
        _BIAS_GRADIENT(
            (*call[:7], call.samples, grad, dbias, sums, deltas),
            call.facts,
            _prepare,
            "bias gradient",
            call,
            grad,
            dbias,
            varying=(call.number,),
        )
    return dbias


def _fake_bias_gradient(grad: Tensor, sums: Tensor, deltas: Tensor, *arguments: Any) -> Tensor:
    bias = _Call(*arguments).bias
    assert bias is not None
    return bias.new_empty(bias.shape)


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
        joined, deltas = _attention_backward(grad, out, sums, *call)
        grads[:3] = _parts(joined, *call[:3])
        if ctx.needs_input_grad[4]:
            grads[4] = _bias_gradient(grad, sums, deltas, *call)
    return tuple(grads)


_attention_backward = define_operation(
    f"attention_backward(Tensor grad, Tensor out, Tensor sums, {ARGUMENTS}) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_bias_gradient = define_operation(
    f"attention_bias_gradient(Tensor grad, Tensor sums, Tensor deltas, {ARGUMENTS}) -> Tensor",
    _run_bias_gradient,
    _fake_bias_gradient,
)
_attention = define_operation(f"attention({ARGUMENTS}) -> (Tensor, Tensor)", _run, _fake, Gradient(_backward, _setup))
