"""Activations of which torch makes several kernels: gated ones and the squared ReLU.

act is a name of `activation.py`; its derivative is computed beside it, so that backward reads its
inputs once. (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), which is exact at both ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.kernels.triton.jit.rounding import rounded, wide


@triton.jit
def value_and_slope(x, act: tl.constexpr):
    """act(x) and its derivative, for x of float32 or float64."""
    if act == "silu":
        s = 1 / (1 + tl.exp(-x))
        return x * s, s * (1 + x * (1 - s))
    elif act == "gelu":
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return x * cdf, cdf + x * density
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        s = 1 / (1 + tl.exp(-2 * inner))
        slope = 2 * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        return x * s, s + x * s * (1 - s) * slope


@triton.jit
def gated_kernel(fused, out, stride, width, act: tl.constexpr, BLOCK: tl.constexpr):
    """out [n, width] = act(gate) up of fused [n, 2 width] = [gate | up]."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < width
    gate = wide(tl.load(fused + row * stride + j, mask=inside, other=0.0))
    up = wide(tl.load(fused + row * stride + width + j, mask=inside, other=0.0))
    value, _ = value_and_slope(gate, act)
    dtype = out.dtype.element_ty
    # rounded as the result of a kernel of its own
    tl.store(out + row * width + j, rounded(wide(rounded(value, dtype)) * up, dtype), mask=inside)


@triton.jit
def gated_backward_kernel(
    fused, grad, out, stride, width, act: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out [n, 2 width]: the gradients of gate and up for that of the result, grad [n, width]."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < width
    gate = wide(tl.load(fused + row * stride + j, mask=inside, other=0.0))
    up = wide(tl.load(fused + row * stride + width + j, mask=inside, other=0.0))
    g = wide(tl.load(grad + row * width + j, mask=inside, other=0.0))
    value, slope = value_and_slope(gate, act)
    dtype = out.dtype.element_ty
    tl.store(out + row * 2 * width + j, rounded(g * up * slope, dtype), mask=inside)
    tl.store(out + row * 2 * width + width + j, rounded(g * value, dtype), mask=inside)


@triton.jit
def squared_relu_kernel(x, out, count, BLOCK: tl.constexpr):
    """out = max(x, 0)^2, flat."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = wide(tl.load(x + i, mask=i < count, other=0.0))
    positive = tl.where(value > 0, value, value * 0)  # 0 of what is not a number stays so
    tl.store(out + i, rounded(positive * positive, out.dtype.element_ty), mask=i < count)


@triton.jit
def squared_relu_backward_kernel(x, grad, out, count, BLOCK: tl.constexpr):
    """out = 2 max(x, 0) grad, flat."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = wide(tl.load(x + i, mask=i < count, other=0.0))
    g = wide(tl.load(grad + i, mask=i < count, other=0.0))
    positive = tl.where(value > 0, value, value * 0)
    tl.store(out + i, rounded(2 * positive * g, out.dtype.element_ty), mask=i < count)
