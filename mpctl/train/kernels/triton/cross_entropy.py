"""The passes of a vocab-parallel cross entropy as one kernel each: maximum, sums, gradient.

Logits are read three times and their gradient is written once, 8 bytes an element in 16 bits;
blocks of torch's own kernels move some 60 and take about a thousand launches a micro batch. Only
the order in which exponentials are added differs from `KernelBackend`'s.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mpctl.train.kernels.triton import define_operation
from mpctl.train.kernels.triton.launch import KernelLaunch, Launcher, blocks, power_of_2

COLUMNS = 4096  # of a row at a time: 16 a thread of 8 warps


def _kernels() -> ModuleType:
    from mpctl.train.kernels.triton.jit import cross_entropy

    return cross_entropy


_MAXIMUM = Launcher(_kernels, "row_maximum_kernel")
_SUMS = Launcher(_kernels, "own_sums_kernel")
_GRADIENT = Launcher(_kernels, "logits_gradient_kernel")


def fused_logits_gradient(
    logits: Tensor, column: Tensor, peak: Tensor, share: Tensor, hit: Tensor, *, words: int, overwrite: bool
) -> Tensor:
    """As `KernelBackend.logits_gradient`."""
    if overwrite:
        _overwrite_logits(logits, column, peak, share, hit, words)
        torch.autograd.graph.increment_version(logits)  # a second backward is then refused
        return logits
    return _logits_gradient(logits, column, peak, share, hit, words)


def _block(width: int) -> int:
    return min(COLUMNS, power_of_2(max(1, width)))


def _prepare_rows(logits: Tensor, words: int) -> KernelLaunch:
    """A program has a row."""
    (n, width), stride = logits.shape, logits.stride(0)
    return KernelLaunch((n,), (stride, words, width), {"BLOCK": _block(words)}, {"num_warps": 8})


def _run_maximum(logits: Tensor, words: int) -> Tensor:
    out = _fake_maximum(logits, words)
    if out.numel():
        _MAXIMUM((logits, out), words, _prepare_rows, logits, words)
    return out


def _fake_maximum(logits: Tensor, words: int) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(logits.shape[:1], dtype=dtype)


def _run_sums(logits: Tensor, column: Tensor, peak: Tensor, words: int) -> tuple[Tensor, Tensor]:
    target, total = _fake_sums(logits, column, peak, words)
    if not words:
        return target.zero_(), total.zero_()
    if len(logits):
        tensors = (logits, column, peak, target, total)
        _SUMS(tensors, words, _prepare_rows, logits, words)
    return target, total


def _fake_sums(logits: Tensor, column: Tensor, peak: Tensor, words: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(peak), torch.empty_like(peak)


def _run_gradient(logits: Tensor, *rows: Any) -> Tensor:
    out = torch.empty_like(logits)
    _write_gradient(out, logits, *rows)
    return out


def _write_gradient(
    out: Tensor, logits: Tensor, column: Tensor, peak: Tensor, share: Tensor, hit: Tensor, words: int
) -> None:
    if logits.numel():
        tensors = (logits, column, peak, share, hit, out)
        _GRADIENT(tensors, words, _prepare_gradient, logits, out, words)


def _prepare_gradient(logits: Tensor, out: Tensor, words: int) -> KernelLaunch:
    (n, width), block = logits.shape, _block(logits.shape[1])
    sizes = logits.stride(0), out.stride(0), words, width
    return KernelLaunch((n, blocks(width, block)), sizes, {"BLOCK": block}, {"num_warps": 8})


_ROWS = "Tensor column, Tensor peak, Tensor share, Tensor hit, int words"
row_maximum = define_operation("row_maximum(Tensor logits, int words) -> Tensor", _run_maximum, _fake_maximum)
own_sums = define_operation(
    "own_sums(Tensor logits, Tensor column, Tensor peak, int words) -> (Tensor, Tensor)", _run_sums, _fake_sums
)
_logits_gradient = define_operation(
    f"logits_gradient(Tensor logits, {_ROWS}) -> Tensor", _run_gradient, lambda logits, *rows: torch.empty_like(logits)
)
_overwrite_logits = define_operation(
    f"logits_gradient_(Tensor(a!) logits, {_ROWS}) -> ()",
    lambda logits, *rows: _write_gradient(logits, logits, *rows),
    lambda logits, *rows: None,
)
