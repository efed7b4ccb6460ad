"""The parallel layout: sizes of the axes, their order over ranks, and how the pipeline is cut."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Le
from pydantic import Field, create_model, model_validator

from mpctl.core.axes import AXES, DEFAULT_ORDER, FILLING
from mpctl.spec.base import Bytes, Count, Layers, StrictModel
from mpctl.spec.layout_text import stage_sizes
from mpctl.spec.schedules import SCHEDULES

if TYPE_CHECKING:
    ScheduleName: TypeAlias = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]  # the names of the table, which an error lists
TensorMode = Literal["1d", "2d", "2.5d", "3d"]
CpComm = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
"""Megatron's --cp-comm-type."""
EXCHANGES: tuple[CpComm, ...] = ("a2a", "a2a+p2p")
"""Those that give each rank of cp a part of the heads for more of the sequence."""


if TYPE_CHECKING:

    class AxisSizes(StrictModel):
        """The sizes of the axes, declared for type checkers."""

        tp: int = 1
        cp: int = 1
        dp: int | None = None
        pp: int = 1

else:
    AxisSizes = create_model(
        "AxisSizes",
        __base__=StrictModel,
        **{
            axis.name: (Count | None, Field(None, description=axis.size))
            if axis.name == FILLING
            else (Count, Field(1, description=axis.size))
            for axis in AXES
        },
    )


class ParallelSpec(AxisSizes):
    """The parallel layout: how the ranks of the cluster share model, batch and states.

    The sizes of the axes multiply to the number of ranks; `order` says which ranks are neighbours
    along which axis.
    """

    ep: Count = Field(1, description="expert-parallel size: ranks that share the experts of a layer")
    etp: Count = Field(
        1, description="expert-tensor-parallel size: ranks that share each expert; 1 when absent, whatever tp is"
    )
    vpp: Count = Field(1, description="model chunks (virtual stages) of each pipeline rank")
    order: str = Field(
        DEFAULT_ORDER,
        description="order of the axes over ranks, fastest-varying first; ep, if named, has its place among "
        "the ranks of experts, else cp's",
    )
    sequence_parallel: bool = Field(False, description="split the sequence over tp between the tensor-parallel regions")
    tp_comm_overlap: bool | None = Field(
        None,
        description="send sequence parallelism's messages during the products that need or make them: mpctl gathers in "
        "two halves, Megatron by Transformer Engine's userbuffers; absent, Megatron on links with multicast, else not",
    )
    zero: Annotated[int, Ge(0), Le(3)] = Field(
        0, description="ZeRO stage over dp x cp: shard optimizer (1), gradients (2), parameters (3)"
    )
    zero_size: Count | None = Field(
        None,
        description="consecutive ranks of dp x cp that divide ZeRO's states; each group has all states "
        "(HSDP); all of dp x cp when absent",
    )
    bucket_bytes: Bytes = Field(
        25 * 2**20, description="bytes of gradients reduced in one message; ZeRO 3 reduces layer by layer"
    )
    overlap_gradients: bool = Field(True, description="reduce gradients while backward computes the rest")
    schedule: ScheduleName = Field("1f1b", description="order of a pipeline's micro batches")
    tensor_mode: TensorMode = Field(
        "1d",
        description="how tp splits matrices: over a row of ranks (1d), a square (2d), layers of "
        "squares (2.5d) or a cube (3d)",
    )
    tensor_depth: Count | None = Field(
        None, description="number d of layers in 2.5d, tp = d q^2; by default the smallest with q >= 2"
    )
    first_stage_layers: Layers | None = Field(None, description="layers of the first stage; an equal share when absent")
    last_stage_layers: Layers | None = Field(None, description="layers of the last stage; an equal share when absent")
    embedding_is_layer: bool = Field(False, description="count the embedding as a layer when stages are cut equally")
    loss_is_layer: bool = Field(False, description="count output head and loss as a layer when stages are cut equally")
    stage_balance: Literal["even", "cost"] = Field(
        "even", description="stages of equal numbers of layers (even) or of equal compute (cost)"
    )
    pipeline_layout: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None,
        description="what each virtual stage has, in the words of Megatron's --pipeline-model-parallel-layout, such as "
        "Et*3|(tt|)*29,m|L: embedding E, layer t, layer of multi-token prediction m, loss L; pp and vpp follow from it",
    )
    cp_comm: CpComm | None = Field(
        None,
        description="how keys and values meet queries under cp: around a ring (p2p), gathered (all_gather), by "
        "an exchange of sequence for heads (a2a, Ulysses), or that within groups and a ring between them (a2a+p2p); "
        "as the runtime does when absent (mpctl: all_gather)",
    )
    cp_a2a_size: Count | None = Field(
        None, description="cp_comm a2a+p2p: consecutive ranks of cp that exchange sequence for heads"
    )
    allow_tp_across_nodes: bool = Field(
        False, description="accept tensor-parallel groups that leave their NVLink domain (by default a node)"
    )

    @model_validator(mode="before")
    @classmethod
    def _sized_by_layout(cls, raw: Any) -> Any:
        """pp and vpp that a layout determines where they are not given."""
        layout = raw.get("pipeline_layout") if isinstance(raw, dict) else None
        return {**raw, **stage_sizes(layout, raw)} if isinstance(layout, str) else raw

    @property
    def stated_cp_comm(self) -> CpComm | None:
        """`cp_comm` where cp splits sequences; None elsewhere, and where the runtime's default holds."""
        return self.cp_comm if self.cp > 1 else None

    @property
    def head_parts(self) -> int:
        """Ranks of cp among which attention's heads are dealt: all under a2a, cp_a2a_size under
        a2a+p2p, else 1."""
        sizes = {"a2a": self.cp, "a2a+p2p": self.cp_a2a_size or 1}
        return sizes.get(self.stated_cp_comm or "", 1)
