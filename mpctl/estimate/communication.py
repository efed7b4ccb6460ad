"""Sizes and bytes that messages, memory and time are counted from.

Sizes are of one micro batch. `batch_sizes` are those of its tensors whole over tp; `local_sizes`
are this rank's part of them between the layers, which a grid of tensor-parallel ranks cuts along
samples and hidden states (tensor_grid.py); in 1d both are equal. Phi is the volume of one phase (a
reduce-scatter or an all-gather) of an all-reduce of the whole hidden states, micro batch x seq x
hidden x bytes, the unit in which plans count volumes.

By hand, 8 samples of 1024 positions, hidden 512, fp32: phi is 16 MiB, and on a square of 2 x 2 a
rank has 4 samples of hidden 256, 4 MiB of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from mpctl.layout.job_layout import JobLayout
from mpctl.operators.layer import LayerStack
from mpctl.operators.matmul import Dims, ParameterSpec
from mpctl.spec.runtime import RuntimeProfile
from mpctl.spec.training import TrainingSpec
from mpctl.units import DTYPE_BYTES

Sizes = Mapping[str, int]


def batch_sizes(layout: JobLayout) -> Sizes:
    """Elements of one micro batch on one rank of cp, by dimension, whole over tp."""
    model, cp = layout.model, layout.job.parallel.cp
    return {
        "batch": layout.job.training.micro_batch_size,
        "seq": model.seq_length // cp,
        "decoder_seq": (model.decoder_seq_length or 0) // cp,
        "hidden": model.hidden,
    }


def local_sizes(layout: JobLayout) -> Sizes:
    """Elements of one micro batch on one rank between the layers, by dimension: `batch_sizes` with
    samples and hidden states cut by the grid of tp. Sequence parallelism is the caller's."""
    sizes, grid = dict(batch_sizes(layout)), layout.grid
    sizes["batch"] //= grid.sample_parts
    sizes["hidden"] //= grid.hidden_parts
    return sizes


def gradient_bytes(training: TrainingSpec, profile: RuntimeProfile) -> int:
    """Bytes of a gradient's element where it is accumulated and reduced: the job's choice, else the
    runtime's, in no fewer bytes than the parameter."""
    if training.gradient_dtype is not None:
        return DTYPE_BYTES[training.gradient_dtype]
    return max(training.value_bytes, DTYPE_BYTES[profile.gradient_dtype or training.dtype])


def message_bytes(layout: JobLayout, dims: Dims) -> int:
    """Bytes of a tensor of these dimensions between the layers, in the training dtype, on one rank
    of tp."""
    sizes = local_sizes(layout)
    return prod(sizes[dim] for dim in dims) * layout.job.training.value_bytes


def phi_bytes(layout: JobLayout, stack: LayerStack) -> int:
    """Bytes of one phase of one all-reduce of the stack's hidden states, whole over tp."""
    sizes = batch_sizes(layout)
    elements = sizes["batch"] * sizes[stack.seq] * sizes["hidden"]
    return elements * layout.job.training.value_bytes


def local_parameters(
    layout: JobLayout, stage: int, *, trained_only: bool = False, whole_only: bool = False
) -> int:
    """Number of parameters that one rank of a stage holds, before ZeRO shares them.

    trained_only: leave frozen parameters out. whole_only: only those that tp does not split.
    """

    def count(weights: Iterable[ParameterSpec]) -> int:
        own = (w for w in weights if not (whole_only and w.is_split))
        return sum(weight.local_numel(layout.grid) for weight in own)

    slices = layout.stage_slices(stage)
    ends = {w.name: w for part in slices for w in part.end_weights(trained_only=trained_only)}
    blocks = sum(
        layers * count(flow.trained if trained_only else flow.part.weights)
        for part in slices
        for layers, flow in part.blocks
    )
    return blocks + count(ends.values())
