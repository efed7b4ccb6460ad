"""How a model is trained: batches, precision, optimizer. Nothing here knows the layout."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mpctl.spec.base import Count, DType, NonNegative, Positive, Probability, Table

RuntimeName = Literal[
    "mpctl",
    "megatron-2020",
    "megatron-2021",
    "megatron-2022",
    "megatron-core",
    "megatron-deepspeed",
    "fsdp",
    "torchtitan",
]


class Training(Table):
    micro_batch_size: Count = Field(1, description="samples a rank computes at once")
    global_batch_size: Count | None = Field(
        None, description="samples of one step over all ranks; one micro batch a rank when absent"
    )
    dtype: DType = Field("fp32", description="of parameters and activations")
    gradient_dtype: DType | None = Field(None, description="fp32 when absent")
    recompute: Literal["none", "selective", "full"] = "none"
    partition_activations: bool = Field(
        False, description="full recomputation: each tp rank keeps a part of a layer's input"
    )
    offload_activations: bool = Field(
        False, description="full recomputation: keep layers' inputs in host memory"
    )
    dropout: Probability = Field(0.0, description="of embeddings and both residual branches")
    attention_dropout: Probability = Field(
        0.0, description="of attention probabilities; above 0 the scores are held in memory"
    )
    loss_scale: Positive = Field(2.0**16, description="of fp16 at the start; it follows overflows")
    loss_scale_window: Count = Field(1000, description="good steps after which it doubles")
    min_loss_scale: Positive = Field(1.0, description="below it an overflow ends the run")
    steps: Count = 100
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    learning_rate: Positive = 3e-4
    min_learning_rate: NonNegative = 3e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    weight_decay: NonNegative = 0.1
    beta1: Probability = 0.9
    beta2: Probability = 0.95
    epsilon: Positive = 1e-8
    clip_norm: NonNegative = Field(1.0, description="of the whole model's gradient; 0 turns it off")
    init_std: Positive = 0.02
    eval_interval: Annotated[int, Field(ge=0)] = Field(
        0, description="steps between validations; 0 validates only at the end"
    )
    eval_samples: Annotated[int, Field(ge=0)] = Field(
        32, description="validation samples each time; 0 turns validation off"
    )
    checkpoint_interval: Annotated[int, Field(ge=0)] = Field(
        0, description="steps between checkpoints; 0 saves only at the end and on a stop"
    )
    checkpoint_at_end: bool = True
    init_from: str | None = Field(
        None,
        description="weights to start from: a Hugging Face directory, what `mpctl weights import` "
        "wrote, or a run; drawn from the seed when absent",
    )
    freeze: list[str] = Field(
        default_factory=list,
        description="parameters that training leaves alone, by patterns over their names such as "
        '"embedding.*" or "layers.[0-5].*"',
    )
    runtime: RuntimeName = Field("mpctl", description="software whose overlaps a plan assumes")

    @property
    def reduced_dtype(self) -> DType:
        """Precision in which gradients are accumulated and reduced."""
        return self.gradient_dtype or ("fp64" if self.dtype == "fp64" else "fp32")
