"""Which layouts a training software runs: a runtime profile's [runs].

A search of a job tries what its runtime runs and nothing else; `mpctl launch` refuses what its own
runtime does not run. From the software's papers and sources.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mpctl.spec.base import DType, StrictModel
from mpctl.spec.parallel import ScheduleName, TensorMode
from mpctl.spec.training import RecomputeMode

ZeroStage = Annotated[int, Field(ge=0, le=3)]


class RuntimeSupport(StrictModel):
    """Layouts that a training software runs; the default is what every pipeline of 1F1B runs."""

    launched: bool = Field(
        False,
        description="whether `mpctl launch` runs what is planned under this profile; false for "
        "other software, which is only planned",
    )
    emit: list[str] = Field(
        [],
        description="launchers of `mpctl plan --emit` that run this software; what is emitted for "
        "one of them is planned under this profile",
    )
    kinds: list[str] = Field(
        [], description="kinds of device that it runs on (cuda, rocm, ...); any when empty"
    )
    schedules: Annotated[list[ScheduleName], Field(min_length=1)] = Field(
        ["1f1b"],
        description="pipeline schedules that a search tries, each with one chunk a stage",
    )
    chunks: bool = Field(False, description="several chunks a stage, interleaved (parallel.vpp)")
    recompute: Annotated[list[RecomputeMode], Field(min_length=1)] = Field(
        ["none", "full"], description="values of training.recompute"
    )
    sequence: bool = Field(False, description="sequence parallelism")
    context: bool = Field(False, description="context parallelism (parallel.cp above 1)")
    zero: Annotated[list[ZeroStage], Field(min_length=1)] = Field(
        [0], description="ZeRO stages; the first where dp x cp is 1"
    )
    tensor_modes: list[TensorMode] = Field(
        ["1d"],
        description="values of parallel.tensor_mode; empty where tp is always 1",
    )
    pipeline: bool = Field(True, description="pipeline parallelism (parallel.pp above 1)")
    by_cost: bool = Field(False, description="stages of equal compute (parallel.stage_balance)")
    ends_as_layers: bool = Field(
        False,
        description="where layers do not divide over the stages, embedding and loss count as a "
        "layer each, if that divides",
    )
    fills_stages: bool = Field(
        False,
        description="a stage takes layers, and at last head and loss, until the cost of all so far "
        "passes its share (pipeline/filled.py); else stages hold equal numbers of layers",
    )
    needs_full_pipeline: bool = Field(
        False,
        description="it refuses fewer micro batches than stages before the last, and, where "
        "replicas reduce gradients, stages without a parameter",
    )
    orders: list[str] = Field(
        [], description="orders of ranks that it has (parallel.order); any when empty"
    )
    dtypes: list[DType] = Field([], description="data types that it trains in; all when empty")

    @property
    def is_used_today(self) -> bool:
        """Whether mpctl launches what is planned under this profile, or writes it for a launcher;
        older software can only be planned for."""
        return self.launched or bool(self.emit)

    def runs_on(self, kind: str | None) -> bool:
        """Whether it runs on devices of this kind; None: the kind is not known."""
        return kind is None or not self.kinds or kind in self.kinds

    @property
    def tensor(self) -> bool:
        """Whether it runs tensor parallelism (parallel.tp above 1)."""
        return bool(self.tensor_modes)
