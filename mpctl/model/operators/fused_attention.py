"""Attention variants that mpctl's GPU kernel supports: shared by the kernel, the planner and the rules.

On CUDA attention with dropout, a window, ALiBi's slopes, a bias or a mask is one kernel that
computes scores block by block (train/kernels/triton/attention.py). Torch computes the attentions that it
refuses, with dropout step by step: scores, mask and dropped scores are then in memory.

By hand: heads of 128 in 16 bits are taken, in 64 bits not.
"""

from __future__ import annotations

from typing import NamedTuple

LARGEST_HEAD = 256
ELEMENT_BYTES = (2, 4)


class Refusal(NamedTuple):
    """Why the kernel does not support an attention, and a supported setting."""

    reason: str
    hint: str


def refusal(element_bytes: int, head_size: int) -> Refusal | None:
    """Why the kernel cannot take heads of this size and elements of `element_bytes` bytes; None
    where it can."""
    if element_bytes not in ELEMENT_BYTES:
        reason = f"numbers of {8 * element_bytes} bits have no fused attention"
        return Refusal(reason, "use training.dtype bf16, fp16 or fp32")
    if head_size > LARGEST_HEAD:
        reason = f"heads of {head_size} have no fused attention"
        return Refusal(reason, f"use heads of at most {LARGEST_HEAD}")
    return None
