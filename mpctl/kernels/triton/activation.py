"""Gated activations and the squared ReLU in one kernel each way.

A gated one moves 3 elements a result forward and 5 backward (gate, up and gradient are read, two
gradients are written), where torch's kernels move 5 and 18. Forward rounds act(gate) as its own
kernel would; backward rounds once. GELU, ReLU and SiLU are one kernel of torch's already.

By hand, swiglu of [gate | up] = [0 | 5] is 0, and the gradients for 1 are [5/2 | 0].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpctl.kernels.activation import Activation
from mpctl.kernels.triton.operation import define_gradient, define_operation

GATES: dict[Activation, str] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
BLOCK = 2048  # results of a program: 16 a thread of 4 warps


def fused_gated(up: Tensor, name: Activation) -> Tensor:
    """act(gate) * up of [.., 2f] = [gate | up] -> [.., f], for a name of GATES."""
    result: Tensor = _gated(up, GATES[name])
    return result


def fused_squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, of any shape."""
    result: Tensor = _squared_relu(x)
    return result


def _run_gated(fused: Tensor, act: str) -> Tensor:
    from mpctl.kernels.triton.jit.activation import gated_kernel

    out, fused = _fake_gated(fused, act), fused.contiguous()
    if out.numel():
        grid, width, block = _grid(out)
        gated_kernel[grid](fused, out, 2 * width, width, act=act, BLOCK=block)
    return out


def _fake_gated(fused: Tensor, act: str) -> Tensor:
    return fused.new_empty((*fused.shape[:-1], fused.shape[-1] // 2))


def _run_gated_backward(fused: Tensor, grad: Tensor, act: str) -> Tensor:
    from mpctl.kernels.triton.jit.activation import gated_backward_kernel

    out, fused, grad = _fake_like(fused, grad), fused.contiguous(), grad.contiguous()
    if out.numel():
        grid, width, block = _grid(grad)
        gated_backward_kernel[grid](fused, grad, out, 2 * width, width, act=act, BLOCK=block)
    return out


def _grid(results: Tensor) -> tuple[tuple[int, int], int, int]:
    """Programs of rows and columns, columns, and columns of a program."""
    import triton

    width = results.shape[-1]
    block = min(BLOCK, triton.next_power_of_2(width))
    return (results.numel() // width, triton.cdiv(width, block)), width, block


def _run_squared(x: Tensor) -> Tensor:
    import triton

    from mpctl.kernels.triton.jit.activation import squared_relu_kernel

    out, count = _fake_like(x), x.numel()
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        squared_relu_kernel[grid](x.contiguous(), out, count, BLOCK=BLOCK)
    return out


def _run_squared_backward(x: Tensor, grad: Tensor) -> Tensor:
    import triton

    from mpctl.kernels.triton.jit.activation import squared_relu_backward_kernel

    out, count = _fake_like(x), x.numel()
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        squared_relu_backward_kernel[grid](
            x.contiguous(), grad.contiguous(), out, count, BLOCK=BLOCK
        )
    return out


def _fake_like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_gated = define_operation("gated(Tensor fused, str act) -> Tensor", _run_gated, _fake_gated)
_gated_backward = define_operation(
    "gated_backward(Tensor fused, Tensor grad, str act) -> Tensor", _run_gated_backward, _fake_like
)
_squared_relu = define_operation("squared_relu(Tensor x) -> Tensor", _run_squared, _fake_like)
_squared_relu_backward = define_operation(
    "squared_relu_backward(Tensor x, Tensor grad) -> Tensor", _run_squared_backward, _fake_like
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.act = inputs[1] if len(inputs) > 1 else ""


def _backward_gated(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _gated_backward(*ctx.saved_tensors, grad, ctx.act), None


def _backward_squared(ctx: Any, grad: Tensor) -> Tensor:
    result: Tensor = _squared_relu_backward(*ctx.saved_tensors, grad)
    return result


define_gradient("gated", _backward_gated, _setup)
define_gradient("squared_relu", _backward_squared, _setup)
