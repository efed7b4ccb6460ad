"""Sums of the rows of tokens in one kernel each way (kernels/routing.py).

Forward reads the k rows of a token where they are and writes one: (k + 1) h elements a token, where
torch's kernels move some 12 k h. Backward reads gradient and rows and writes k gradients, 3 k h at
most. Sums have the bits of the reference, but for the gradients of weights, which are sums along a
row in another order.

Letters: T tokens, h hidden, k experts of a token, x copies of a row, R rows.
"""

from __future__ import annotations

from torch import Tensor

from mpctl.kernels.triton import define_operation

ROW_BLOCK = 1024  # columns of a program: 8 a thread of 4 warps


def _run_sum(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    import triton

    from mpctl.kernels.triton.jit.rows import rows_kernel

    out, (count, tokens), width = _fake_sum(rows, weights, places), places.shape, rows.shape[1]
    if out.numel():
        block = min(ROW_BLOCK, triton.next_power_of_2(width))
        rows_kernel[(tokens, triton.cdiv(width, block))](
            rows.contiguous(), None if weights is None else weights.contiguous(),
            places.contiguous(), out, tokens, width, COUNT=count, BLOCK=block,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _fake_sum(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    return rows.new_empty((places.shape[1], rows.shape[1]))


def _run_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    import triton

    from mpctl.kernels.triton.jit.rows import row_gradients_kernel

    d_rows, d_weights = _fake_gradients(grad, rows, weights, places, targets)
    (copies, count, tokens), width = targets.shape, rows.shape[1]
    if tokens:
        row_gradients_kernel[(tokens, count)](
            grad.contiguous(), rows.contiguous(), weights.contiguous(), places.contiguous(),
            targets.contiguous(), d_rows, d_weights, tokens, width, COUNT=count, COPIES=copies,
            BLOCK=min(ROW_BLOCK, triton.next_power_of_2(width)), enable_fp_fusion=False,
        )  # fmt: skip
    return d_rows, d_weights


def _fake_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    return rows.new_empty((targets.numel(), rows.shape[1])), weights.new_empty(weights.shape)


sum_of_rows = define_operation(
    "sum_of_rows(Tensor rows, Tensor? weights, Tensor places) -> Tensor", _run_sum, _fake_sum
)
row_gradients = define_operation(
    "row_gradients(Tensor grad, Tensor rows, Tensor weights, Tensor places, Tensor targets)"
    " -> (Tensor, Tensor)",
    _run_gradients,
    _fake_gradients,
)
