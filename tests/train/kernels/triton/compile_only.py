"""A device that compiles kernels and runs none:
`python -m tests.train.kernels.triton.compile_only [CAPABILITY [CASE ..]]`, of which 90 and all.

The project's own code launches each kernel on CPU tensors; Triton compiles it for a compute
capability with the assembler that its wheel contains, and what would launch it does nothing.
Triton's interpreter accepts programs that its compiler refuses (types, shapes, the values of a
branch), and says nothing of registers and shared memory. Prints one JSON line a compiled kernel:
its name, the case it is of, bytes of shared memory, registers and bytes of spills a thread (which
the assembler says; PTX has no registers yet), the PTX's instructions by name, and the arguments
that are multiplied in 32 bits.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from mpctl.train.kernels.activation import Activation
from mpctl.train.kernels.adamw import AdamWStep
from mpctl.train.kernels.attention import AttentionVariant, slopes
from mpctl.train.kernels.counter_rng import DropoutMask
from mpctl.train.kernels.fp8 import E4M3, E5M2
from mpctl.train.kernels.routing import combined_rows
from mpctl.train.kernels.triton.attention import fused_attention
from mpctl.train.kernels.triton.backend import TritonKernels
from mpctl.train.kernels.triton.columns import SUMMED
from mpctl.train.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.train.transport.group import Group

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}  # a program, by capability
THREADS = 1024


class CompileOnly:
    """What triton asks of a driver, of a device 0 that is not there. shared: bytes of shared memory
    that a program may have."""

    def __init__(self, capability: int = 90, shared: int | None = None) -> None:
        self.capability, self.utils = capability, self
        self.shared = SHARED_BYTES[capability] if shared is None else shared

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared, "multiprocessor_count": 132}

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


def sums() -> Iterator[str]:
    """Norms, and the kernels that leave the sums of biases behind, of rows up to the widest."""
    kernels = TritonKernels()

    def given(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    for width in (768, 2048, 4096, 8192):
        for centred in (True, False):
            x, branch, weight, bias = (given(2, 4, width), given(2, 4, width), given(width), given(width))
            total, y = kernels.residual_norm(
                x, branch, weight, bias if centred else None, 1e-5, centred=centred, branch_bias=bias
            )
            ends = torch.zeros_like(total), torch.zeros_like(y)
            torch.autograd.grad((total, y), (x, weight), ends)
            yield f"norm {width} {'layernorm' if centred else 'rmsnorm'}"
    for name in SUMMED:
        up, bias = given(2, 64, 8192), given(8192)
        y = kernels.summed_activation(up, name, bias)
        torch.autograd.grad(y, (up, bias), torch.zeros_like(y))
        yield name
    qkv, bias = given(2, 64, 768), given(768)
    parts = kernels.split_heads(qkv, (256, 256, 256), 128, bias)
    torch.autograd.grad(parts, qkv, [torch.zeros(2, 2, 64, 128, dtype=qkv.dtype)] * 3)
    samples, key = torch.arange(2), torch.tensor(7, dtype=torch.int32)
    mask = DropoutMask(key, 0.1, samples, torch.arange(64), range(768))
    y = kernels.dropout_add(qkv, mask, torch.zeros_like(qkv), bias)
    torch.autograd.grad(y, bias, torch.zeros_like(y))
    yield "heads and dropout"


def updates() -> Iterator[str]:
    """AdamW with copies in 16 bits."""
    values, gradients, averages, squares = ([torch.zeros(512)] for _ in range(4))
    counts, copies = [torch.zeros(())], [torch.zeros(512, dtype=torch.bfloat16)]
    scale, found = torch.ones(()), torch.zeros(())
    step = AdamWStep(values, gradients, averages, squares, counts, copies, 1e-3, 0.1, 0.9, 0.95, 1e-8, scale, found)
    TritonKernels().adamw(step)
    yield "adamw"


def attend(dtype: torch.dtype, d: int, group: int, what: str) -> str:
    """Causal attention and its gradients for heads of d, `group` of which share their keys; what:
    plain, with dropout by a key on the device or by a number, or the whole of what a variant may have.
    Its name."""
    heads = 2 * group
    x = torch.zeros((1, 128, heads, d), dtype=dtype).transpose(1, 2).requires_grad_()
    key = torch.zeros((1, 128, 2, d), dtype=dtype).transpose(1, 2).requires_grad_()
    bias = torch.zeros((1, heads, 128, 128), dtype=dtype, requires_grad=True)
    places = (range(128), range(128), range(heads))
    seed = 7 if what == "number" else torch.tensor(7, dtype=torch.int32)
    dropout = None if what == "plain" else DropoutMask(seed, 0.1, torch.arange(1), *places)
    variant, leaves = AttentionVariant(range(128), is_causal=True, dropout=dropout), [x, key]
    if what == "whole":
        seen, leaves = torch.ones((1, 1, 128, 128), dtype=torch.bool), [x, key, bias]
        alibi = slopes(heads)
        variant = AttentionVariant(range(128), True, None, seen, bias, 64, alibi, dropout)
    y = fused_attention(x, key, key, variant)
    torch.autograd.grad(y, leaves, torch.zeros_like(y))
    return f"{dtype} {d} {group} {what}".removeprefix("torch.")


def usual_attention() -> Iterator[str]:
    """The kernels of Llama's heads with dropout, of which one spilled 752 bytes a thread."""
    yield attend(torch.bfloat16, 128, 4, "dropout")


def numbered_attention() -> Iterator[str]:
    """Dropout by a number, as every run has it outside of a captured graph."""
    yield attend(torch.bfloat16, 16, 1, "number")


def attentions() -> Iterator[str]:
    """Each kernel of attention for each size of its tiles."""
    for group in (1, 4):
        for what in ("plain", "dropout"):
            for d in (64, 80, 96, 128, 256):
                yield attend(torch.bfloat16, d, group, what)
    for d in (64, 80, 128, 256):
        yield attend(torch.float16, d, 2, "whole")
    for d in (64, 128, 256):
        yield attend(torch.float32, d, 2, "dropout")
    yield attend(torch.float32, 64, 2, "whole")


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
                logits * 1,
                torch.zeros(4, dtype=torch.int64),
                group=Group(),
                first=0,
                words=31_990,
                overwrite=overwrite,
                backend=TritonKernels(),
            )
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


CASES: tuple[Callable[[], Iterator[str | None]], ...] = (
    dropouts,
    attentions,
    usual_attention,
    numbered_attention,
    rotations,
    casts,
    losses,
    activations,
    rows,
    sums,
    updates,
)


def instructions(ptx: str) -> Counter[str]:
    """How often each instruction of a PTX text stands in it, such as `ld.global.v4.b32`."""
    return Counter(re.findall(r"^\s+(?:@\S+\s+)?([a-z][a-z0-9_.:]+)\s", ptx, re.MULTILINE))


# arguments that are multiplied by a row, a head or a sample to make an address
STRIDES = (
    "strides",
    "stride",
    "out_stride",
    "width",
    "x_batch",
    "x_head",
    "x_row",
    "out_batch",
    "out_head",
    "out_row",
    "table_batch",
)


def arguments(kernel: Any) -> list[str]:
    """The names of a compiled kernel's parameters, in the PTX's order."""
    found: list[str] = []

    def add(name: str, kind: Any, path: tuple[int, ...]) -> None:
        if isinstance(kind, tuple):
            for i, each in enumerate(kind):
                add(name, each, (*path, i))
        elif kind != "constexpr":
            found.append(name)

    for i, (name, kind) in enumerate(kernel.src.signature.items()):
        add(name, kind, (i,))
    return found


def narrow_products(ptx: str, names: list[str]) -> list[str]:
    """The strides among a kernel's parameters that are multiplied in 32 bits."""
    source: dict[str, str] = {}  # a register and the parameter that it holds
    for register, number in re.findall(r"ld\.param\.[bsu]32\s+(%r\d+), \[\w+_param_(\d+)\]", ptx):
        if int(number) < len(names) and names[int(number)] in STRIDES:
            source[register] = f"{names[int(number)]} (parameter {number})"
    for to, register in re.findall(r"mov\.[bu]32\s+(%r\d+), (%r\d+);", ptx):
        if register in source:
            source[to] = source[register]
    found = set()
    for operands in re.findall(r"\b(?:mul|mad)\.lo\.[su]32\s+([^;]+);", ptx):
        found |= {source[each] for each in operands.split(", ")[1:3] if each in source}
    return sorted(found)


def resources(log: str) -> dict[str, int]:
    """Registers a thread and bytes of spills that an assembler's log tells of one kernel."""
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    assert len(spills) == len(registers) == 1, log
    return {"registers": int(registers[0]), "spills": int(spills[0][0])}


class Reports:
    """Prints each kernel once it is compiled."""

    def __init__(self) -> None:
        self._seen: dict[bytes, dict[str, int]] = {}
        self._printed: set[int] = set()

    def print_new(self, label: str, log: str) -> None:
        """The kernels that are compiled and not yet printed; log: the assembler's, one after the
        other."""
        logs = re.split(r"(?=ptxas\S* info\s+: \d+ bytes gmem)", log)
        by_name: dict[str, list[str]] = {}
        for part in logs:
            for name in re.findall(r"Compiling entry function '(\w+)'", part):
                by_name.setdefault(name, []).append(part)
        for kernel in compiled_kernels():
            if id(kernel) not in self._printed:
                self._printed.add(id(kernel))
                binary = kernel.asm["cubin"]
                if binary not in self._seen:  # the same program has one file
                    self._seen[binary] = resources(by_name[kernel.name].pop(0))
                print(report(label, kernel, self._seen[binary]), flush=True)


def report(label: str, kernel: Any, of_assembler: dict[str, int]) -> str:
    """One line about a compiled kernel."""
    ptx = kernel.asm["ptx"]
    return json.dumps(
        {
            "kernel": kernel.name,
            "case": label,
            "shared": kernel.metadata.shared,
            **of_assembler,
            "narrow": narrow_products(ptx, arguments(kernel)),
            "ptx": instructions(ptx),
        }
    )


def compiled_kernels() -> Iterator[Any]:
    """What was compiled of the project's kernels, in that order for each."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith("mpctl.train.kernels.triton.jit."):
            for value in vars(module).values():
                if isinstance(value, triton.JITFunction) and value.fn.__module__ == name:
                    yield from value.device_caches[0][0].values()


def main() -> None:
    """Compile what the cases launch and print the kernels."""
    capability, wanted = int((sys.argv[1:] or ["90"])[0]), set(sys.argv[2:])
    triton.runtime.driver.set_active(CompileOnly(capability))
    triton.knobs.nvidia.dump_ptxas_log = True
    reports = Reports()
    for case in CASES:
        if case.__name__ in wanted or (not wanted and case not in (usual_attention, numbered_attention)):
            labels = case()
            while True:
                with redirect_stdout(io.StringIO()) as log:
                    label = next(labels, StopIteration)
                if label is StopIteration:
                    break
                reports.print_new(str(label or case.__name__), log.getvalue())


if __name__ == "__main__":
    main()
