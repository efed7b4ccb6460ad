"""What a training software keeps and moves for adapters and a frozen base: a table of its runtime profile.

Facts of software, read in its source or fitted to published runs; the preset says which. No figure
depends on a model.
"""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from mpctl.spec.adapter import BasePrecision
from mpctl.spec.base import Amount, DType, Part, Seconds, StrictModel

Bandwidth = Annotated[float, Ge(0), Le(1e15)]


class MemoryPasses(StrictModel):
    """How often a tensor is read or written in one micro batch; an unfused gelu reads once and
    writes once, which is 2."""

    forward: Amount = Field(description="reads and writes of the tensor in forward")
    backward: Amount = Field(description="reads and writes of the tensor in backward")


class AdapterCosts(StrictModel):
    """Adapters and frozen bases: what the software keeps and moves for them. The defaults are those of
    mpctl's layers."""

    dtype: DType | None = Field(
        None, description="data type of A and B where training.adapter.dtype is absent; that of the parameters if empty"
    )
    input_copy: Literal["none", "training", "adapter"] = Field(
        "none",
        description="what each adapter keeps of its input, which is its product's: nothing of its own, a copy in "
        "training.dtype (float32 adapters under autocast), or one in the adapter's data type",
    )
    mask_bytes: Amount = Field(
        0.0, description="bytes kept for each element of the dropout mask of an adapter; 0: the mask is drawn again"
    )
    adds_in_place: bool = Field(
        True, description="the adapter's gradient of an input is added to its product's in place"
    )
    remakes_activation: bool = Field(
        False, description="the input of the adapter of an MLP's last product is computed again from gate and up"
    )
    dora_results: Amount = Field(1.0, description="results of its product that dora keeps for each adapter")
    dora_base: bool = Field(
        False, description="dora forms W + BA in every forward, from B A I; else its norms from A A^T and W A^T"
    )
    inputs: MemoryPasses = Field(
        MemoryPasses(forward=0, backward=1),
        description="passes over the input of each adapter beside those of its products",
    )
    results: MemoryPasses = Field(
        MemoryPasses(forward=1, backward=0),
        description="passes over the result of each adapter beside those of its products",
    )
    dropout: MemoryPasses = Field(
        MemoryPasses(forward=2, backward=2),
        description="further passes over its input where training.adapter.dropout is above 0",
    )
    dora: MemoryPasses = Field(
        MemoryPasses(forward=2, backward=3), description="further passes over the result of each adapter with dora"
    )
    host: Seconds = Field(0.0, description="host time of one adapter's forward, seconds; its backward takes twice")
    dequantize: dict[BasePrecision, Part] = Field(
        default_factory=dict,
        description="share of the memory's bandwidth that dequantising reaches, by base_precision; 1 when absent",
    )
    narrow_activation: bool = Field(
        False, description="the input of an MLP's activation is kept in 8 bits where products are multiplied in them"
    )
    base_inputs: Amount = Field(
        0.0, description="bytes kept for each element of the input of every frozen product that is dequantised"
    )
    narrow_products: bool = Field(
        False, description="an fp8 base is multiplied in fp8 on devices that have it, without dequantising"
    )
    unquantized_dtype: DType | None = Field(
        None, description="data type of embeddings, norms and head beside a quantised base; training.dtype when absent"
    )
    shards_quantized: bool = Field(True, description="ZeRO 3 shares a quantised base; else every replica has all of it")
    gathers_quantized: bool = Field(
        True, description="ZeRO 3 gathers the stored bits, which are dequantised after it; else training.dtype"
    )
    pcie_gathers: Bandwidth = Field(
        0.0,
        description="bytes/s at most of ZeRO 3's gathers between devices of one node over PCIe, where NCCL "
        "copies through host memory; 0: the link's",
    )
    quantized_tensor: bool = Field(True, description="a quantised base with parallel.tp above 1")
    shards_rank: bool = Field(
        False,
        description="tp cuts the rank of the adapters of column products, whose narrow results are gathered, and the "
        "results of those of row products, which are gathered too (Megatron-Bridge)",
    )
