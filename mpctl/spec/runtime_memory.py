"""What a training software holds in memory beside what every training needs: a part of its profile (runtime.py)."""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from mpctl.spec.base import AS_MEMORY, Amount, Count, CountOrZero, DType, Part, StrictModel
from mpctl.spec.training import CrossEntropy, TrainingSpec


class CommunicatorMemory(StrictModel):
    """Memory of an NCCL or RCCL communicator on a device (mpctl/plan/estimate/libraries.py)."""

    connection_bytes: Annotated[float, Ge(0), Le(1e12), AS_MEMORY] = Field(
        description="bytes of one channel's buffers for one peer that it receives from"
    )
    channels: Count = Field(description="channels of a group within a node or NVLink domain")
    channels_a_card: Count = Field(
        description="channels of a group over several nodes, for each of its ranks on one of them"
    )


class RuntimeMemory(StrictModel):
    """Memory that a training software takes in addition to what every training needs, from its
    source code unless stated otherwise; no figure depends on a model."""

    kernels: str = Field(
        "mpctl",
        description="kernels whose saved activations are counted: mpctl, megatron, eager (as "
        "megatron, without fused activations) or half (torchtitan's, which recompute every second "
        "matrix product)",
    )
    parameter_dtype: DType | None = Field(
        None,
        description="data type of the only copy of parameters, which the optimizer updates; when "
        "absent there are master copies",
    )
    remainder_bytes: CountOrZero = Field(
        0,
        description="bytes of what a bf16 parameter's master adds to it where training.optimizer_dtype is given "
        "(a precision-aware optimizer); 0: the master is complete",
    )
    gradient_bytes: dict[DType, Amount] = Field(
        default_factory=dict,
        description="bytes of a gradient by training.dtype, where training.gradient_dtype names none; "
        "fp32 ones take as many, if more than 4; the reduced dtype's when absent",
    )
    gradients_unknown: bool = Field(
        False,
        description="nobody knows which gradients the software holds: gradient_bytes are the least, also of a job that "
        "names none, and a plan says what float32 ones take",
    )
    assumes_dropout: bool = Field(
        False, description="dropout counts as on where scores are held: the software's default"
    )
    logit_bytes: Amount = Field(0.0, description="bytes held for each logit during the loss, besides the logit itself")
    cross_entropy: CrossEntropy = Field(
        "fused", description="training.cross_entropy where the job does not say it; logit_bytes and logits are its"
    )
    loss_chunks: Count | None = Field(None, description="cross_entropy linear: chunks of a micro batch's tokens")
    loss_chunk_tokens: Count | None = Field(
        None, description="cross_entropy linear: tokens of a chunk, instead of loss_chunks; Liger's law without both"
    )
    loss_gradients: Literal["forward", "backward"] = Field(
        "backward",
        description="cross_entropy linear: the pass that computes gradients: forward, or backward from logits that "
        "it makes again",
    )
    weight_gradients: Literal["one", "layer"] = Field(
        "one", description="weight gradients held at once in backward: the largest one, or a layer's"
    )
    reduction_bytes: Amount = Field(
        0.0, description="further bytes held for each gradient, if replicas reduce them: DDP's buckets"
    )
    gather_buffers: Amount = Field(
        0.0,
        description="hidden states of a micro batch, gathered over tp, that buffers of "
        "asynchronous tensor parallelism hold all the time",
    )
    spare_receives: CountOrZero = Field(
        0,
        description="buffers for the next message of each kind from another stage, in addition to that "
        "of a message under way",
    )
    slack: Part = Field(1.0, description="bytes that the allocator reserves per allocated byte")
    context_bytes: Annotated[float, Ge(0), Le(1e12), AS_MEMORY] = Field(
        0.0, description="bytes of the device's libraries, outside of the allocator"
    )
    workspaces: CountOrZero = Field(
        0,
        description="threads that multiply matrices, each with a workspace "
        "(cluster.device.blas_workspace): forward's and backward's; 0 where slack was fitted to "
        "measured peaks, which contain them",
    )
    communicators: CommunicatorMemory | None = Field(
        None, description="what communicators hold; when absent they are part of context_bytes"
    )
    source: str = Field("", description="where the figures come from")

    def stored_as(self, training: TrainingSpec) -> DType:
        """The data type of parameters between steps; that of training where 16 bits are updated."""
        own = None if training.master_weights is False else self.parameter_dtype
        return own or training.chosen_dtype
