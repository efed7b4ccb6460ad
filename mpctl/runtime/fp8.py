"""Where training in fp8 meets a rank's modules: its table of scales, bound to its linear layers.

By hand, GPT of 2 layers in two stages: a table of 8 rows on both, of which each binds 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from mpctl.checkpoint.manifest import read_manifest
from mpctl.checkpoint.saved_model import SavedModel
from mpctl.errors import InputError
from mpctl.layers.fp8 import CastsToFp8, Fp8Operands, Fp8Scales
from mpctl.layout.job_layout import JobLayout
from mpctl.spec.job import JobSpec
from mpctl.weights.origin import open_origin

LEAST_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0


def multiplies_in_fp8(job: JobSpec) -> bool:
    """Whether the job's linear layers cast the operands of their products to fp8."""
    return job.training.dtype == "fp8"


def require_fp8(job: JobSpec, device: torch.device) -> None:
    """Raises InputError where the job multiplies in fp8 and the GPU cannot."""
    if multiplies_in_fp8(job) and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        check_capability(name, capability, is_amd=torch.version.hip is not None)


def check_capability(name: str, capability: tuple[int, int], *, is_amd: bool = False) -> None:
    """Raises InputError unless a GPU of this name and compute capability multiplies in fp8."""
    if is_amd or capability < LEAST_CAPABILITY:
        least, has = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        message = f"fp8 needs an NVIDIA GPU of compute capability {least} or more, {name} has {has}"
        raise InputError.of("fp8-device", "training.dtype", message, "use --dtype bf16")


def fp8_scales(layout: JobLayout, chunks: Iterable[nn.Module], device: torch.device) -> Fp8Scales:
    """The table of delayed scaling for the whole model of a layout, bound to the layers of these
    chunks; an empty one where the job has no such scaling."""
    training = layout.job.training
    if not multiplies_in_fp8(layout.job) or training.fp8_recipe != "delayed":
        return Fp8Scales((), 1, device)
    scales = Fp8Scales(layout.table.linear_layers, training.fp8_amax_history_len, device)
    scales.bind(fp8_layers(chunks))
    return scales


def restored_scales(
    layout: JobLayout, chunks: Iterable[nn.Module], device: torch.device, origin: Path
) -> Fp8Scales:
    """As `fp8_scales`, with what the run or checkpoint at `origin` has seen, so that a model is
    evaluated with the scales of its training; other origins have none."""
    scales = fp8_scales(layout, chunks, device)
    saved = open_origin(origin)
    if isinstance(saved, SavedModel):
        scales.load(read_manifest(saved.checkpoint).fp8)
    return scales


def fp8_layers(chunks: Iterable[nn.Module]) -> dict[str, Fp8Operands]:
    """What casts the operands of each linear layer of some chunks, by the layer's global name."""
    return {
        name + rest: operands
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, CastsToFp8)
        for rest, operands in module.fp8_operands().items()
    }
