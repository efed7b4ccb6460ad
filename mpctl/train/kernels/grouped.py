"""Grouped products: consecutive blocks of rows, each multiplied by a matrix of its own.

With rows X [R, i] in groups of r_0, r_1, .. and matrices W [G, o, i]:

    Y_g = X_g W_g^T         grouped_output             [R, o]
    dX_g = dY_g W_g         grouped_input_gradient     [R, i]
    dW_g = dY_g^T X_g       grouped_weight_gradient    [G, o, i], zeros of a group without rows

torch's `grouped_mm` is one kernel for all groups and reads the sizes on the device. It is used
where it takes the tensors (float32, bfloat16 and float16, rows of a multiple of 16 bytes) and is
faster: on a CPU, and on CUDA for bfloat16 with compute capability 9.0 and more (elsewhere it is a
loop itself: torch's GroupedBlas.cpp). Otherwise a product for each group writes into one result,
which needs the sizes on the host. Both give the same bits on a CPU. Fake tensors other than
bfloat16 take the loop, since grouped_mm has no form for them.

Letters: R rows, G groups, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED = 16  # bytes


class RowGroups:
    """Numbers of rows of consecutive groups.

    counts: int64 [G], on the device. sizes: the same on the host, or a function that returns them
    and is called only where they are needed, since it makes the host wait for the device.
    """

    def __init__(self, counts: Tensor, sizes: Sequence[int] | Callable[[], Sequence[int]]) -> None:
        self.counts, self._sizes = counts, sizes

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Numbers of rows, on the host."""
        return self._sizes() if callable(self._sizes) else self._sizes

    @cached_property
    def offsets(self) -> Tensor:
        """The end of each group, int32 [G], on the device."""
        return self.counts.cumsum(0).to(torch.int32)

    def slices(self) -> Iterator[slice]:
        """The rows of each group."""
        stop = 0
        for size in self.sizes:
            start, stop = stop, stop + size
            yield slice(start, stop)


def grouped_output(rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """rows [R, i], weight [G, o, i] -> [R, o]: each group's rows times its matrix transposed."""
    if _is_one_kernel(rows, weight):
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=groups.offsets)
    result = rows.new_empty(len(rows), weight.shape[1])
    for matrix, own in zip(weight, groups.slices(), strict=True):
        torch.mm(rows[own], matrix.t(), out=result[own])
    return result


def grouped_input_gradient(grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """grad [R, o] of the output, weight [G, o, i] -> [R, i]."""
    if _is_one_kernel(grad, weight):
        return F.grouped_mm(grad, weight, offs=groups.offsets)
    result = grad.new_empty(len(grad), weight.shape[2])
    for matrix, own in zip(weight, groups.slices(), strict=True):
        torch.mm(grad[own], matrix, out=result[own])
    return result


def grouped_weight_gradient(grad: Tensor, rows: Tensor, groups: RowGroups) -> Tensor:
    """grad [R, o] of the output, rows [R, i] -> [G, o, i]."""
    if _is_one_kernel(grad, rows):
        return F.grouped_mm(grad.t(), rows, offs=groups.offsets)
    result = grad.new_empty(len(groups.counts), grad.shape[1], rows.shape[1])
    for matrix, own in zip(result, groups.slices(), strict=True):
        torch.mm(grad[own].t(), rows[own], out=matrix)  # zeros where there are no rows
    return result


def _is_one_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether grouped_mm takes two contiguous tensors and is worth it."""
    if a.dtype != b.dtype or a.dtype not in _DTYPES or not len(a):
        return False
    widths = {a.shape[-1], *b.shape[-2:]} if b.dim() == 3 else {a.shape[-1], b.shape[-1]}
    if any(width * a.itemsize % _ALIGNED for width in widths):
        return False
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    if isinstance(a, FakeTensor) or a.device.type == "meta":
        return a.dtype == torch.bfloat16
    if a.device.type == "cuda":
        return a.dtype == torch.bfloat16 and torch.cuda.get_device_capability(a.device) >= (9, 0)
    return a.device.type == "cpu"
