"""A device that compiles kernels and runs none: `python -m tests.kernels.triton.compile_only`.

The project's own code launches each kernel on CPU tensors; Triton compiles it for compute
capability 9.0 with the assembler that its wheel contains, and what would launch it does nothing.
Triton's interpreter accepts programs that its compiler refuses (types, shapes, the values of a
branch), and says nothing of registers and shared memory. Prints one JSON line a compiled kernel:
its name, the bytes of shared memory and the PTX's instructions by name.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from mpctl.kernels.activation import Activation
from mpctl.kernels.attention import AttentionVariant, slopes
from mpctl.kernels.counter_rng import DropoutMask
from mpctl.kernels.fp8 import E4M3, E5M2
from mpctl.kernels.routing import combined_rows
from mpctl.kernels.triton.backend import TritonKernels
from mpctl.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.transport.group import Group

SHARED_BYTES, REGISTERS, THREADS = 232_448, 65_536, 1024  # a multiprocessor of an H100


class CompileOnly:
    """What triton asks of a driver, of a device 0 of compute capability 9.0 that is not there."""

    compiled: list[str]

    def __init__(self) -> None:
        self.compiled = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        assert len(binary) > 0
        return 0, 0, 0, 0, THREADS

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None


def dropouts() -> Iterator[None]:
    """Dropout of [b, s, h] and [b, a, s, keys], keys as numbers and on the device."""
    samples, key = torch.arange(2), torch.tensor(7, dtype=torch.int32)
    kernels = TritonKernels()
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float64):
        x = torch.zeros((2, 8, 2048), dtype=dtype, requires_grad=True)
        mask = DropoutMask(key, 0.1, samples, torch.arange(8), range(2048))
        y = kernels.dropout_add(x, mask, torch.zeros_like(x))
        torch.autograd.grad(y, x, torch.zeros_like(y))
        yield
    probabilities = torch.zeros((2, 3, 8, 112), dtype=torch.bfloat16)
    kernels.dropout(probabilities, DropoutMask(5, 0.1, samples, range(8), range(112), range(3)))
    yield


def attentions() -> Iterator[None]:
    """Each kernel of attention for each size of its tiles, with all that a variant may have."""
    kernels, samples = TritonKernels(), torch.arange(1)
    sizes = [(torch.bfloat16, 64), (torch.float16, 80), (torch.bfloat16, 256), (torch.float32, 64)]
    for dtype, d in sizes:
        x = torch.zeros((1, 128, 2, d), dtype=dtype).transpose(1, 2).requires_grad_()
        key = torch.zeros((1, 128, 1, d), dtype=dtype).transpose(1, 2).requires_grad_()
        bias = torch.zeros((1, 2, 128, 128), dtype=dtype, requires_grad=True)
        places = (range(128), range(128), range(2))
        dropout = DropoutMask(torch.tensor(7, dtype=torch.int32), 0.1, samples, *places)
        usual = AttentionVariant(range(128), is_causal=True, dropout=dropout)
        seen = torch.ones((1, 1, 128, 128), dtype=torch.bool)
        whole = AttentionVariant(range(128), True, None, seen, bias, 64, slopes(2), dropout)
        for variant, leaves in ((usual, [x, key]), (whole, [x, key, bias])):
            y = kernels.attention(x, key, key, variant)
            torch.autograd.grad(y, leaves, torch.zeros_like(y))
            yield


def rotations() -> Iterator[None]:
    """Rotary positions of queries that lie inside of a fused product."""
    fused = torch.zeros((2, 8, 3 * 4 * 128), dtype=torch.bfloat16, requires_grad=True)
    x = fused.unflatten(-1, (-1, 128)).transpose(1, 2)[:, :4]
    for shape in ((8, 64), (2, 1, 8, 32)):
        cos, sin = torch.zeros((2, *shape))
        y = TritonKernels().rotate(x, cos, sin)
        torch.autograd.grad(y, fused, torch.zeros_like(y))
        yield


def casts() -> Iterator[None]:
    """Both formats, layouts and 16-bit types, with and without the largest element."""
    kernels, scale = TritonKernels(), torch.tensor(1.0)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros((128, 256), dtype=dtype)
        for to in (E4M3, E5M2):
            kernels.fp8_cast(x, scale, to, columns=True, amax=torch.tensor(0.0))
            kernels.fp8_cast(x, scale, to, rows=False, columns=True)
            kernels.fp8_cast(x, scale, to)
    yield


def losses() -> Iterator[None]:
    """A cross entropy of 31,990 words in 32,000 columns, over its logits and beside them."""
    for dtype in (torch.bfloat16, torch.float32):
        for overwrite in (True, False):
            logits = torch.zeros((4, 32_000), dtype=dtype, requires_grad=True)
            loss = vocab_parallel_cross_entropy(
                logits * 1, torch.zeros(4, dtype=torch.int64), group=Group(), first=0,
                words=31_990, overwrite=overwrite, backend=TritonKernels(),
            )  # fmt: skip
            loss.sum().backward()
            yield


def activations() -> Iterator[None]:
    """Gated activations and the squared ReLU."""
    names: list[Activation] = ["swiglu", "geglu", "geglu_tanh", "relu2"]
    for name in names:
        for dtype in (torch.bfloat16, torch.float32):
            up = torch.zeros((4, 2 * 2048), dtype=dtype, requires_grad=True)
            y = TritonKernels().activation(up, name)
            torch.autograd.grad(y, up, torch.zeros_like(y))
            yield


def rows() -> Iterator[None]:
    """Rows of tokens, weighted and not, and their gradients in two copies."""
    places = torch.zeros((2, 8, 16), dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.zeros((256, 2048), dtype=dtype, requires_grad=True)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weights = torch.zeros((16, 8), dtype=wide, requires_grad=True)
        y = combined_rows(x, weights, places, TritonKernels())
        torch.autograd.grad(y, (x, weights), torch.zeros_like(y))
        yield


CASES = (
    dropouts,
    attentions,
    rotations,
    casts,
    losses,
    activations,
    rows,
)


def instructions(ptx: str) -> Counter[str]:
    """How often each instruction of a PTX text stands in it, such as `ld.global.v4.b32`."""
    return Counter(re.findall(r"^\s+(?:@\S+\s+)?([a-z][a-z0-9_.:]+)\s", ptx, re.MULTILINE))


def report(key: str, kernel: Any) -> str:
    """One line about a compiled kernel."""
    counts = instructions(kernel.asm["ptx"])
    shared = kernel.metadata.shared
    return json.dumps({"kernel": kernel.name, "key": key, "shared": shared, "ptx": counts})


def main() -> None:
    """Compile what the cases launch and print the kernels."""
    driver = CompileOnly()
    triton.runtime.driver.set_active(driver)
    wanted = set(sys.argv[1:])
    for case in CASES:
        if not wanted or case.__name__ in wanted:
            for _ in case():
                pass
    for name, module in sorted(sys.modules.items()):
        if name.startswith("mpctl.kernels.triton.jit."):
            print_kernels(module)


def print_kernels(module: Any) -> None:
    """Print what was compiled of the kernels that a module defines."""
    for value in vars(module).values():
        if isinstance(value, triton.JITFunction) and value.fn.__module__ == module.__name__:
            for key, kernel in value.device_caches[0][0].items():
                print(report(key, kernel))


if __name__ == "__main__":
    main()
