"""What a launch of each Triton kernel costs the host: `python -m benchmarks.kernel_launches`.

Kernels are compiled and what would launch them does nothing
(tests/train/kernels/triton/compile_only.py), so that no GPU is needed. Processor time of one call on one
thread, the least of many turns; first without and then with the gradient that autograd records, and
backward as autograd runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from mpctl.train.kernels.attention import AttentionVariant
from mpctl.train.kernels.counter_rng import DropoutMask
from mpctl.train.kernels.triton.backend import TritonKernels
from tests.train.kernels.triton.compile_only import CompileOnly

CALLS, TURNS = 20, 200


def microseconds(call: Callable[[], Any]) -> float:
    """Of processor time of a call, the least mean of CALLS in TURNS."""
    call()
    least = float("inf")
    for _ in range(TURNS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        least = min(least, time.thread_time() - start)
    return 1e6 * least / CALLS


def cases() -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    """A function of a tensor, and the tensor."""
    kernels, seed = TritonKernels(), torch.tensor(7, dtype=torch.int32)
    heads = torch.zeros((1, 128, 2, 64), dtype=torch.bfloat16).transpose(1, 2)
    rows, table = range(128), torch.zeros(128, 32)
    pairs = DropoutMask(seed, 0.1, torch.arange(1), rows, rows, range(2))
    variant = AttentionVariant(rows, is_causal=True, dropout=pairs)
    hidden = torch.zeros((2, 8, 2048), dtype=torch.bfloat16)
    mask = DropoutMask(seed, 0.1, torch.arange(2), range(8), range(2048))
    return {
        "attention, dropout": (lambda x: kernels.attention(x, x, x, variant), heads),
        "dropout, residual": (lambda x: kernels.dropout_add(x, mask, hidden), hidden),
        "rotary positions": (lambda x: kernels.rotate(x, table, table), heads),
        "SwiGLU": (lambda x: kernels.activation(x, "swiglu"), hidden),
    }


def main() -> None:
    """Print the table."""
    triton.runtime.driver.set_active(CompileOnly())
    torch.set_num_threads(1)
    print("| us of the host | forward | recorded | backward |\n|---|---|---|---|")
    for name, (compute, x) in cases().items():
        leaf = x.detach().requires_grad_()
        y = compute(leaf)
        grad = torch.zeros_like(y)
        backward = partial(torch.autograd.grad, y, leaf, grad, retain_graph=True)
        calls = partial(compute, x), partial(compute, leaf), backward
        figures = " | ".join(f"{microseconds(call):.0f}" for call in calls)
        print(f"| {name} | {figures} |")


if __name__ == "__main__":
    main()
