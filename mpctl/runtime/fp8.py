"""Where training in fp8 meets a rank's modules: its table of scales, bound to its linear layers.

By hand, GPT of 2 layers in two stages: a table of 8 rows on both, of which each binds 4.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from mpctl.kernels.fp8_operands import Fp8Operands
from mpctl.kernels.fp8_scales import Fp8Scales
from mpctl.kernels.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.layout.job_layout import JobLayout
from mpctl.spec.job import JobSpec


def multiplies_in_fp8(job: JobSpec) -> bool:
    """Whether the job's linear layers cast the operands of their products to fp8."""
    return job.training.dtype == "fp8"


def fp8_scales(layout: JobLayout, chunks: Iterable[nn.Module], device: torch.device) -> Fp8Scales:
    """The table of delayed scaling for the whole model of a layout, bound to the layers of these
    chunks; an empty one where the job has no such scaling."""
    training = layout.job.training
    if not multiplies_in_fp8(layout.job) or training.fp8_recipe != "delayed":
        return Fp8Scales((), 1, device)
    scales = Fp8Scales(layout.table.linear_layers, training.fp8_amax_history_len, device)
    scales.bind(fp8_layers(chunks))
    return scales


def fp8_layers(chunks: Iterable[nn.Module]) -> dict[str, Fp8Operands]:
    """What casts the operands of each linear layer of some chunks, by the layer's global name."""
    return {
        name: module.fp8
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and module.fp8 is not None
    }
