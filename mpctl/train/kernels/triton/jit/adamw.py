"""AdamW over many tensors in one kernel (arXiv 1711.05101).

A program updates a chunk of one tensor. A table has the chunks' addresses, so that the number of
launches does not follow the number of tensors. Counts of updates lie on the device, since only it
knows whether the last one was skipped; powers of the betas are taken in float64, where 1 - beta^n
keeps its digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.train.kernels.triton.jit.bits import rounded

FIELDS = tl.constexpr(7)
"""Columns of a table: addresses of value, gradient, moments, copy (0 for none) and count of
updates, each of the chunk's first element, and the number of elements."""


@triton.jit
def pointer(address, dtype: tl.constexpr):
    """An address as a pointer."""
    return address.to(tl.pointer_type(dtype))


@triton.jit
def adamw_kernel(
    table,
    scale,
    found_inf,
    rate,
    decay,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG1: tl.constexpr,
    LOG2: tl.constexpr,
    EPSILON: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update a chunk: gradients are divided by `scale`; nothing changes where found_inf is 1.
    decay: the rate times the weight decay. COPY: the type of the copies of the values."""
    row = table + tl.program_id(0).to(tl.int64) * FIELDS
    value = pointer(tl.load(row), tl.float32)
    gradient = pointer(tl.load(row + 1), tl.float32)
    average = pointer(tl.load(row + 2), tl.float32)
    square = pointer(tl.load(row + 3), tl.float32)
    copy = tl.load(row + 4)
    target = pointer(copy, COPY)
    updates = tl.load(pointer(tl.load(row + 5), tl.float32)).to(tl.float64)
    correction1 = (1 - tl.exp(updates * LOG1)).to(tl.float32)
    correction2 = tl.sqrt_rn((1 - tl.exp(updates * LOG2)).to(tl.float32))
    step_size = tl.div_rn(rate, correction1)
    count = tl.load(row + 6)
    if found_inf is not None:
        count = tl.where(tl.load(found_inf) == 1.0, 0, count)
    divisor = 1.0
    if scale is not None:
        divisor = tl.load(scale)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < count
        g = tl.load(gradient + i, mask=inside, other=0.0)
        if scale is not None:
            g = tl.div_rn(g, divisor)
        p = tl.load(value + i, mask=inside, other=0.0)
        m = tl.load(average + i, mask=inside, other=0.0)
        v = tl.load(square + i, mask=inside, other=0.0)
        p = p - decay * p
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        p = p - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), correction2) + EPSILON)
        tl.store(value + i, p, mask=inside)
        tl.store(average + i, m, mask=inside)
        tl.store(square + i, v, mask=inside)
        if copy != 0:
            tl.store(target + i, rounded(p, COPY), mask=inside)
