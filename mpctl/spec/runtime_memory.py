"""Memory that a training software takes besides what every training does: a profile's [memory].

Which activations its kernels save, the data type of its gradients, what its allocator and its
libraries take beyond the tensors. From the software's sources where not said otherwise; no figure
depends on a model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mpctl.spec.base import Amount, DType, Part, StrictModel
from mpctl.spec.measures import AS_MEMORY


class RuntimeMemory(StrictModel):
    """Memory beyond the states and activations that every software holds."""

    kernels: str = Field(
        "mpctl",
        description="kernels whose saved activations are counted: mpctl, megatron, eager (as "
        "megatron, without fused activations) or half (torchtitan's, which recompute every second "
        "matrix product)",
    )
    parameter_dtype: DType | None = Field(
        None,
        description="data type of the only copy of parameters, which the optimizer updates; with "
        "master copies when absent",
    )
    gradient_bytes: dict[DType, Amount] = Field(
        default_factory=dict,
        description="bytes of a gradient by training.dtype, unless training.gradient_dtype is "
        "narrower than fp32; the reduced dtype's when absent",
    )
    assumes_dropout: bool = Field(
        False, description="dropout counts as on where scores are held: the software's default"
    )
    logit_bytes: Amount = Field(
        0.0, description="bytes held for a logit during the loss, beside the logit itself"
    )
    weight_gradients: Literal["one", "layer"] = Field(
        "one",
        description="weight gradients held at once in backward: the largest one, or a layer's",
    )
    reduction_bytes: Amount = Field(
        0.0,
        description="bytes held for a gradient besides, where replicas reduce them: DDP's buckets",
    )
    gather_buffers: Amount = Field(
        0.0,
        description="hidden states of a micro batch, gathered over tp, that buffers of "
        "asynchronous tensor parallelism hold all the time",
    )
    slack: Part = Field(1.0, description="bytes that the allocator reserves for an allocated byte")
    context_bytes: Annotated[float, Field(ge=0, le=1e12), AS_MEMORY] = Field(
        0.0, description="bytes of the device's libraries, outside of the allocator"
    )
    source: str = Field("", description="where the figures come from")
