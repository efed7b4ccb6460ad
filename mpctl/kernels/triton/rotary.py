"""Rotary positions in one kernel, forward and backward.

Backward turns the gradient by the opposite angles, so that the table alone is kept. In 16 bits an
element of the heads moves 4 bytes each way, where separate kernels move some 50. Forward has the
bits of `rotary.rotated`; backward rounds once, which torch's separate kernels do twice.

The result lies in memory as [b, s, a, d], so that attention's own result, which is laid out as its
queries are, needs no copy to become [b, s, a d].

By hand, a head of 2 at cos 0, sin 1: (x, y) -> (-y, x).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpctl.kernels.triton.operation import define_gradient, define_operation

TILE = 2048  # pairs of a program: 16 a thread of 4 warps


def fused_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, a, s, d] turned by a table, cos and sin [s, r/2] or [b, 1, s, r/2]."""
    result: Tensor = _rotate(x, cos, sin, False)
    return result


def _run(x: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> Tensor:
    import triton

    from mpctl.kernels.triton.jit.rotary import rotate_kernel

    x = x if x.stride(-1) == 1 else x.contiguous()
    out, (b, a, s, d), half = _fake(x, cos, sin, is_back), x.shape, cos.shape[-1]
    if not x.numel():
        return out
    rest = d - 2 * half
    block_half = triton.next_power_of_2(half)
    block_rows = max(1, min(TILE // block_half, triton.next_power_of_2(s)))
    cos, sin = cos.contiguous(), sin.contiguous()
    rotate_kernel[(triton.cdiv(s, block_rows), a, b)](
        x, cos, sin, out, *x.stride()[:3], *out.stride()[:3],
        cos.stride(0) if cos.ndim == 4 and cos.shape[0] > 1 else 0, s,
        half=half, rest=rest, is_back=is_back, BLOCK_ROWS=block_rows, BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(1, rest)), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _fake(x: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> Tensor:
    b, a, s, d = x.shape
    return x.new_empty((b, s, a, d)).transpose(1, 2)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.is_back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _rotate(grad, *ctx.saved_tensors, not ctx.is_back), None, None, None


_rotate = define_operation(
    "rotate(Tensor x, Tensor cos, Tensor sin, bool is_back) -> Tensor", _run, _fake
)
define_gradient("rotate", _backward, _setup)
