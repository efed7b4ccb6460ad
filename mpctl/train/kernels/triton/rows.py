"""Sums of the rows of tokens in one kernel each way (train/kernels/routing.py).

Forward reads the k rows of a token where they are and writes one: (k + 1) h elements a token, where
torch's kernels move some 12 k h. Backward reads gradient and rows and writes k gradients, 3 k h at
most. Sums have the bits of the reference, but for the gradients of weights, which are sums along a
row in another order.

Letters: T tokens, h hidden, k experts of a token, x copies of a row, R rows.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from mpctl.train.kernels.triton import define_operation
from mpctl.train.kernels.triton.launch import KernelLaunch, Launcher, blocks, power_of_2

ROW_BLOCK = 1024  # columns of a program: 8 a thread of 4 warps


def _kernels() -> ModuleType:
    from mpctl.train.kernels.triton.jit import rows

    return rows


_SUM = Launcher(_kernels, "rows_kernel")
_GRADIENTS = Launcher(_kernels, "row_gradients_kernel")


def _run_sum(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    out = _fake_sum(rows, weights, places)
    if out.numel():
        weights = None if weights is None else weights.contiguous()
        tensors = rows.contiguous(), weights, places.contiguous(), out
        _SUM(tensors, None, _prepare_sum, out, len(places))
    return out


def _prepare_sum(out: Tensor, count: int) -> KernelLaunch:
    tokens, width = out.shape
    block = min(ROW_BLOCK, power_of_2(width))
    constants = {"COUNT": count, "BLOCK": block}
    return KernelLaunch((tokens, blocks(width, block)), (tokens, width), constants, {"enable_fp_fusion": False})


def _fake_sum(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    return rows.new_empty((places.shape[1], rows.shape[1]))


def _run_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    d_rows, d_weights = _fake_gradients(grad, rows, weights, places, targets)
    if targets.numel():
        given = (x.contiguous() for x in (grad, rows, weights, places, targets))
        _GRADIENTS((*given, d_rows, d_weights), None, _prepare_gradients, targets, rows.shape[1])
    return d_rows, d_weights


def _prepare_gradients(targets: Tensor, width: int) -> KernelLaunch:
    copies, count, tokens = targets.shape
    block = min(ROW_BLOCK, power_of_2(width))
    constants = {"COUNT": count, "COPIES": copies, "BLOCK": block}
    return KernelLaunch((tokens, count), (tokens, width), constants, {"enable_fp_fusion": False})


def _fake_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    return rows.new_empty((targets.numel(), rows.shape[1])), weights.new_empty(weights.shape)


sum_of_rows = define_operation(
    "sum_of_rows(Tensor rows, Tensor? weights, Tensor places) -> Tensor", _run_sum, _fake_sum
)
row_gradients = define_operation(
    "row_gradients(Tensor grad, Tensor rows, Tensor weights, Tensor places, Tensor targets) -> (Tensor, Tensor)",
    _run_gradients,
    _fake_gradients,
)
