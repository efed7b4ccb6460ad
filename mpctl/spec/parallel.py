"""The parallel layout: sizes of the axes, their order over ranks, and how the pipeline is cut."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from mpctl.axes import AXES, DEFAULT_ORDER, FILLING
from mpctl.spec.base import Bounded, Bytes, Count, Field, Layers, StrictModel
from mpctl.spec.schedules import SCHEDULES

if TYPE_CHECKING:
    ScheduleName: TypeAlias = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]  # the names of the table, told where one is wrong
TensorMode = Literal["1d", "2d", "2.5d", "3d"]


if TYPE_CHECKING:

    class AxisSizes(StrictModel):
        """The sizes of the axes, as type checkers know them."""

        tp: int = 1
        cp: int = 1
        dp: int | None = None
        pp: int = 1

else:
    types = {axis.name: Count | None if axis.name == FILLING else Count for axis in AXES}
    keys = {axis.name: Field(axis.size, None if axis.name == FILLING else 1) for axis in AXES}
    AxisSizes = type("AxisSizes", (StrictModel,), {"__annotations__": types, **keys})


class ParallelSpec(AxisSizes):
    """The parallel layout: how the ranks of the cluster share model, batch and states.

    The sizes of the axes multiply to the number of ranks; `order` says which ranks are neighbours
    along which axis.
    """

    vpp: Count = Field("model chunks (virtual stages) of each pipeline rank", 1)
    order: str = Field("order of the axes over ranks, fastest-varying first", DEFAULT_ORDER)
    sequence_parallel: bool = Field(
        "split the sequence over tp between the tensor-parallel regions", False
    )
    zero: Annotated[int, Bounded(ge=0, le=3)] = Field(
        "ZeRO stage over dp x cp: shard optimizer (1), gradients (2), parameters (3)", 0
    )
    bucket_bytes: Bytes = Field(
        "bytes of gradients reduced in one message; ZeRO 3 reduces layer by layer", 25 * 2**20
    )
    overlap_gradients: bool = Field("reduce gradients while backward computes the rest", True)
    schedule: ScheduleName = Field("order of a pipeline's micro batches", "1f1b")
    tensor_mode: TensorMode = Field(
        "how tp splits matrices: over a row of ranks (1d), a square (2d), squares "
        "in layers (2.5d) or a cube (3d)",
        "1d",
    )
    tensor_depth: Count | None = Field(
        "layers d of 2.5d, for which tp = d q^2; the least for q >= 2 by default", None
    )
    first_stage_layers: Layers | None = Field(
        "layers of the first stage; an equal share when absent", None
    )
    last_stage_layers: Layers | None = Field(
        "layers of the last stage; an equal share when absent", None
    )
    embedding_is_layer: bool = Field(
        "count the embedding as a layer when stages are cut equally", False
    )
    loss_is_layer: bool = Field(
        "count output head and loss as a layer when stages are cut equally", False
    )
    stage_balance: Literal["even", "cost"] = Field(
        "stages of equal numbers of layers (even) or of equal compute (cost)", "even"
    )
    allow_tp_across_nodes: bool = Field(
        "accept tensor-parallel groups that leave their NVLink domain (by default a node)", False
    )
