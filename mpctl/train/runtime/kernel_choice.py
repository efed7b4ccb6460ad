"""The kernels that a rank computes with: those of its device, and the same on all ranks.

What several ranks of a group compute alike (norms without sequence parallelism, biases, the update
of a replica under ZeRO 0) stays equal only if they run the same kernels: Triton's and torch's round
differently. A host without a C compiler, or one compilation that fails on a shared cache, would let
its ranks drift away from the others unnoticed. So the ranks compare their choices before they build
the model: one maximum over all ranks of [d, -d], d being a digest of the choice in words. By hand,
d 5 on one rank and 7 on the other: [7, -5], and 7 is not 5. No two ranks compute the same
attention, so one that differs is only a warning: it may be slower, and rounds differently.

Warnings are lines of a rank's log, which the launcher shows (run/history/logs.py).
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections import Counter

import torch

from mpctl.core.errors import RunFailed
from mpctl.core.units import ranks_text
from mpctl.train.kernels.attention import AttentionVariant
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.partial_attention import use_flash_attention_3
from mpctl.train.runtime.step_guard import CAUSE_FIRST_SECONDS
from mpctl.train.transport.group import Group

TEXT_BYTES = 256


class FallbackKernels(KernelBackend):
    """torch's kernels on a device that should have Triton's. reason: why it has not."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @property
    def warning(self) -> str:
        """Warning of the missing Triton, its cost and the fix."""
        return (
            f"Triton is missing ({self.reason}): each dropout takes 15 kernels instead of 1, and "
            "attention with dropout, a window, ALiBi slopes, a mask or a bias keeps its scores in "
            "memory. The plan counts neither: steps are slower and the peak is higher (Triton "
            "needs pip install triton, a C compiler and Python's headers on every host)"
        )


class KernelsDiffer(RunFailed):
    """Some ranks have Triton's kernels, others not; is_secondary: this rank has them."""

    def __init__(self, words: str, *, is_secondary: bool) -> None:
        super().__init__(words)
        self.is_secondary = is_secondary


def machine_kernels(device: torch.device, world: Group) -> KernelBackend:
    """The fastest kernels that run on the device of every rank: on CUDA Triton's, or torch's if no
    rank has Triton, with a warning. All ranks of `world` call it. Raises KernelsDiffer if only some
    have it."""
    if device.type != "cuda":
        return TORCH_BACKEND
    kernels = find_kernels(device)
    require_same(kernels, world, device)
    return kernels


def find_kernels(device: torch.device) -> KernelBackend:
    """Triton's kernels after a first launch on a CUDA device, or FallbackKernels, with a warning.
    Torch's attention becomes FlashAttention-3 where that is installed."""
    # Imported here, since it registers operations with torch: 20 ms at each rank's start on a CPU.
    from mpctl.train.kernels.triton.backend import fused_kernels

    try:
        kernels = fused_kernels(device)
        use_flash_attention_3(torch.cuda.get_device_capability(device))
        return kernels
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        fallback = FallbackKernels(f"{type(error).__name__}: {reason}")
        print(f"WARNING: {fallback.warning}", flush=True)
        return fallback


def require_same(kernels: KernelBackend, world: Group, device: torch.device) -> None:
    """Return if all ranks of `world`, which all call it, have Triton's kernels, or none has; those
    whose attention is computed as on the fewest ranks warn. Raises KernelsDiffer on every rank
    otherwise, as the cause on those without Triton."""
    words = choice(kernels, device)
    digest = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "big")
    ends = torch.tensor([digest, -digest], device=device)
    largest, least = world.all_reduce(ends, "max").tolist()
    if largest == -least:
        return
    text = words.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    row = torch.tensor(list(text), dtype=torch.uint8, device=device)
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in world.all_gather(row[None], 0).tolist()]
    lacks = torch.tensor([isinstance(kernels, FallbackKernels)], device=device).to(torch.uint8)
    odd = [rank for rank, one in enumerate(world.all_gather(lacks, 0).tolist()) if one]
    if 0 < len(odd) < len(texts):
        raise _difference(kernels, world.rank, texts, odd)
    usual, _ = Counter(texts).most_common(1)[0]
    if words != usual:
        print(
            f"WARNING: on host {platform.node()} {words}; on most ranks {usual}: all wait for "
            "the slower, and losses differ by rounding",
            flush=True,
        )


def choice(kernels: KernelBackend, device: torch.device) -> str:
    """The kernels in words, the same on two ranks that round alike: `TritonKernels, attention by
    cuDNN's kernel`; of attention that of causal rows in bf16 with heads of 128."""
    query = torch.empty((1, 1, 128, 128), dtype=torch.bfloat16, device=device)
    variant = AttentionVariant(range(128), is_causal=True)
    attention = kernels.attention_name(query, query, query, variant)
    return f"{type(kernels).__name__}, attention by {attention}"


def _difference(kernels: KernelBackend, rank: int, texts: list[str], odd: list[int]) -> KernelsDiffer:
    if not isinstance(kernels, FallbackKernels):
        time.sleep(CAUSE_FIRST_SECONDS)  # so that the cause is recorded first
        return KernelsDiffer(f"{ranks_text(odd)} without Triton, which rank {rank} has", is_secondary=True)
    other = next(number for number in range(len(texts)) if number not in odd)
    here = f"host {platform.node()} has no Triton ({kernels.reason})"
    return KernelsDiffer(
        f"{here}, rank {other} has {texts[other]}: what both compute would drift apart (every host "
        "needs the same torch, Triton, a C compiler and Python's headers)",
        is_secondary=False,
    )
