"""The passes of a vocab-parallel cross entropy as one kernel each: maximum, sums, gradient.

Logits are read three times and their gradient is written once, 8 bytes an element in 16 bits;
blocks of torch's own kernels move some 60 and take about a thousand launches a micro batch. Only
the order in which exponentials are added differs from `KernelBackend`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpctl.kernels.triton import define_operation

COLUMNS = 4096  # of a row at a time: 16 a thread of 8 warps


def fused_logits_gradient(
    logits: Tensor, column: Tensor, peak: Tensor, share: Tensor, hit: Tensor, *, words: int,
    overwrite: bool,
) -> Tensor:  # fmt: skip
    """As `KernelBackend.logits_gradient`."""
    if overwrite:
        _overwrite_logits(logits, column, peak, share, hit, words)
        torch.autograd.graph.increment_version(logits)  # a second backward is then refused
        return logits
    return _logits_gradient(logits, column, peak, share, hit, words)


def _block(width: int) -> int:
    import triton

    return min(COLUMNS, int(triton.next_power_of_2(max(1, width))))


def _run_maximum(logits: Tensor, words: int) -> Tensor:
    from mpctl.kernels.triton.jit.cross_entropy import row_maximum_kernel

    out, (n, width) = _fake_maximum(logits, words), logits.shape
    if n:
        row_maximum_kernel[(n,)](
            logits, out, logits.stride(0), words, width, BLOCK=_block(words), num_warps=8
        )
    return out


def _fake_maximum(logits: Tensor, words: int) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(logits.shape[:1], dtype=dtype)


def _run_sums(logits: Tensor, column: Tensor, peak: Tensor, words: int) -> tuple[Tensor, Tensor]:
    from mpctl.kernels.triton.jit.cross_entropy import own_sums_kernel

    target, total = _fake_sums(logits, column, peak, words)
    n, width = logits.shape
    if not words:
        return target.zero_(), total.zero_()
    if n:
        own_sums_kernel[(n,)](
            logits, column, peak, target, total, logits.stride(0), words, width,
            BLOCK=_block(words), num_warps=8,
        )  # fmt: skip
    return target, total


def _fake_sums(logits: Tensor, column: Tensor, peak: Tensor, words: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(peak), torch.empty_like(peak)


def _run_gradient(logits: Tensor, *rows: Any) -> Tensor:
    out = torch.empty_like(logits)
    _write_gradient(out, logits, *rows)
    return out


def _write_gradient(
    out: Tensor, logits: Tensor, column: Tensor, peak: Tensor, share: Tensor, hit: Tensor,
    words: int,
) -> None:  # fmt: skip
    import triton

    from mpctl.kernels.triton.jit.cross_entropy import logits_gradient_kernel

    (n, width), block = logits.shape, _block(logits.shape[1])
    if n and width:
        logits_gradient_kernel[(n, triton.cdiv(width, block))](
            logits, column, peak, share, hit, out, logits.stride(0), out.stride(0), words, width,
            BLOCK=block, num_warps=8,
        )  # fmt: skip


_ROWS = "Tensor column, Tensor peak, Tensor share, Tensor hit, int words"
row_maximum = define_operation(
    "row_maximum(Tensor logits, int words) -> Tensor", _run_maximum, _fake_maximum
)
own_sums = define_operation(
    "own_sums(Tensor logits, Tensor column, Tensor peak, int words) -> (Tensor, Tensor)",
    _run_sums,
    _fake_sums,
)
_logits_gradient = define_operation(
    f"logits_gradient(Tensor logits, {_ROWS}) -> Tensor",
    _run_gradient,
    lambda logits, *rows: torch.empty_like(logits),
)
_overwrite_logits = define_operation(
    f"logits_gradient_(Tensor(a!) logits, {_ROWS}) -> ()",
    lambda logits, *rows: _write_gradient(logits, logits, *rows),
    lambda logits, *rows: None,
)
