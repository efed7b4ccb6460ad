"""The parallel layout: sizes of the axes, their order over ranks, and how the pipeline is cut."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mpctl.spec.base import Bytes, Count, Table

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]


class Parallel(Table):
    tp: Count = Field(1, description="tensor-parallel size")
    pp: Count = Field(1, description="pipeline stages")
    dp: Count | None = Field(None, description="data-parallel size; derived when absent")
    cp: Count = Field(1, description="context-parallel size")
    vpp: Count = Field(1, description="model chunks (virtual stages) a pipeline rank holds")
    order: str = Field("tp-cp-dp-pp", description="axes, fastest-varying over ranks first")
    sequence_parallel: bool = Field(
        False, description="split the sequence over tp outside the tensor-parallel regions"
    )
    zero: Annotated[int, Field(ge=0, le=3)] = Field(0, description="ZeRO stage over dp x cp")
    bucket_bytes: Bytes = Field(
        25 * 2**20, description="of gradients reduced in one message; at ZeRO 3 a layer's instead"
    )
    overlap_gradients: bool = Field(
        True, description="start a bucket's reduction while backward computes the rest"
    )
    schedule: ScheduleName = "1f1b"
    tensor_mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    first_stage_layers: Count | None = Field(None, description="layers of the first stage")
    last_stage_layers: Count | None = Field(None, description="layers of the last stage")
    embedding_is_layer: bool = Field(False, description="count the embedding as a layer")
    loss_is_layer: bool = Field(False, description="count the output head and loss as a layer")
    stage_balance: Literal["even", "cost"] = Field(
        "even", description="stages of equal numbers of layers, or of layers that cost as much"
    )
    allow_tp_across_nodes: bool = Field(
        False, description="accept tensor-parallel groups that leave their node"
    )
