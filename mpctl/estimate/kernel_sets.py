"""The sets of kernels whose saved activations are known (saved_activations.py).

A runtime's preset names one as memory.kernels: `mpctl` is this project's own, `megatron` those of
Megatron-LM and Transformer Engine, `eager` the same without fused activations, `half` torchtitan's,
which recompute every second product.
"""

from __future__ import annotations

from typing import Literal, get_args

from mpctl.errors import InputError
from mpctl.spec.presets import get_file

KernelSet = Literal["mpctl", "megatron", "eager", "half"]
KERNEL_SETS: dict[str, KernelSet] = {name: name for name in get_args(KernelSet)}


def kernel_set(name: str, runtime: str) -> KernelSet:
    """The kernel set that a runtime's preset names as memory.kernels; InputError with the preset's
    file where its saved activations are not known here."""
    if name not in KERNEL_SETS:
        file = get_file("runtimes", runtime, where="training.runtime")
        message = f"memory.kernels: the saved activations of kernels {name!r} are not known"
        hint = f"use one of {', '.join(KERNEL_SETS)}"
        raise InputError.of("bad-preset", str(file.path), message, hint)
    return KERNEL_SETS[name]
