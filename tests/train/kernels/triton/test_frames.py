"""A kernel writes its results whole and nothing beside them.

What an operation allocates is the middle of a larger buffer of one repeated byte: after the kernel
the frame around it is as it was, and of the middle every element is written. Of the results that
several programs write, the tests have one sample and one head: a program that writes too far would
otherwise write what the next one writes again, and Triton's interpreter runs them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpctl.train.kernels.attention import AttentionVariant, slopes
from mpctl.train.kernels.counter_rng import DropoutMask
from mpctl.train.kernels.fp8 import E4M3
from mpctl.train.kernels.triton.attention import fused_attention
from mpctl.train.kernels.triton.backend import TritonKernels

FRAME = 1 << 16  # bytes on either side, more than a tile
FILL = 0xFF  # what is not a number in every float format, and no truth value


class Framed(TorchFunctionMode):
    """Tensors that are allocated inside have a frame."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, Tensor]] = []  # buffers of bytes and the tensors within

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (Tensor.new_empty, torch.empty_like):
            return result
        size = result.untyped_storage().nbytes()
        buffer = torch.full((size + 2 * FRAME,), FILL, dtype=torch.uint8, device=result.device)
        middle = buffer[FRAME : FRAME + size].view(result.dtype)
        framed = middle.as_strided(result.shape, result.stride(), middle.storage_offset())
        self.made.append((buffer, framed))
        return framed

    def differentiate(self, result: Tensor, leaves: list[Tensor]) -> None:
        """Run backward, in whose kernels tensors have a frame too: a mode does not reach what
        autograd calls."""
        node = result.grad_fn
        assert node is not None
        node.register_prehook(lambda gradients: self.__enter__() and None)
        node.register_hook(lambda *_: self.__exit__(None, None, None))
        torch.autograd.grad(result, leaves, torch.ones_like(result))

    def check(self) -> None:
        """Assert that frames are whole and results are written."""
        assert self.made
        for buffer, result in self.made:
            assert (buffer[:FRAME] == FILL).all(), "written before the first element"
            assert (buffer[-FRAME:] == FILL).all(), "written behind the last element"
            found = result.contiguous().flatten().view(torch.uint8)
            untouched = (found.view(-1, result.element_size()) == FILL).all(-1)
            assert not untouched.any(), "an element of a result is not written"


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def attention(frames: Framed, dtype: torch.dtype, whole: bool) -> None:
    """40 rows and 72 keys of heads of 24 numbers: no block is full."""
    query, key = (normal(1, 1, n, 24, dtype=dtype).requires_grad_() for n in (40, 72))
    samples, rows = torch.tensor([5]), range(32, 72)
    mask = DropoutMask(7, 0.2, samples, rows, range(72), range(1))
    variant, leaves = AttentionVariant(rows, True, dropout=mask), [query, key]
    if whole:
        bias = normal(1, 1, 40, 72, dtype=dtype).requires_grad_()
        seen, leaves = torch.ones(1, 1, 40, 72, dtype=torch.bool), [*leaves, bias]
        variant = AttentionVariant(rows, False, None, seen, bias, None, slopes(1), mask)
    with frames:
        result = fused_attention(query, key, key, variant)
    frames.differentiate(result, leaves)


def dropout(frames: Framed) -> None:
    x = normal(3, 7, 1100, dtype=torch.bfloat16).requires_grad_()
    mask = DropoutMask(7, 0.2, torch.arange(3), range(7), range(1100))
    with frames:
        y = TritonKernels().dropout_add(x, mask, x.detach())
    frames.differentiate(y, [x])


def rotation(frames: Framed) -> None:
    """Of 40 columns 28 are turned: neither halves nor the rest fill a block."""
    x = normal(1, 1, 5, 40).requires_grad_()
    with frames:
        y = TritonKernels().rotate(x, normal(5, 14), normal(5, 14))
    frames.differentiate(y, [x])


def activation(frames: Framed) -> None:
    for name, width in (("swiglu", 2 * 2100), ("relu2", 2100)):
        up = normal(1, width).requires_grad_()
        with frames:
            y = TritonKernels().activation(up, name)  # type: ignore[arg-type]
        frames.differentiate(y, [up])


def rows(frames: Framed) -> None:
    x, places, weights = normal(4, 1100), torch.tensor([[2], [0]]), torch.ones(1, 2)
    targets, grad = torch.tensor([[[1], [0]]]), normal(1, 1100)
    with frames:
        TritonKernels().weighted_rows(x, weights, places)
        TritonKernels().weighted_gradients(grad, x, weights, places, targets)


def cast(frames: Framed) -> None:
    x, scale = normal(70, 130), torch.tensor(1.0)
    with frames:
        TritonKernels().fp8_cast(x, scale, E4M3, columns=True)


def loss(frames: Framed) -> None:
    logits, zeros = normal(1, 5000), torch.zeros(1)
    column = torch.zeros(1, dtype=torch.int64)
    kernels = TritonKernels()
    with frames:
        peak = kernels.row_maximum(logits, words=4990)
        kernels.own_sums(logits, column, peak, words=4990)
        kernels.logits_gradient(logits, column, peak, zeros, zeros, words=4990, overwrite=False)


CASES: dict[str, Callable[[Framed], None]] = {
    "attention": partial(attention, dtype=torch.float32, whole=False),
    "whole attention": partial(attention, dtype=torch.float16, whole=True),
    "dropout": dropout,
    "rotation": rotation,
    "activation": activation,
    "rows": rows,
    "cast": cast,
    "loss": loss,
}


@pytest.fixture(autouse=True)
def on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


@pytest.mark.parametrize("name", CASES)
def test_results_are_written_whole_and_nothing_else_is(name: str) -> None:
    frames = Framed()
    CASES[name](frames)
    frames.check()
