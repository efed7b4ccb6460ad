"""The JSON of `mpctl plan --compare-tensor-modes` as types: schema mpctl.tensor-modes/1. Sizes are
in bytes, times in seconds.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from mpctl.errors import IssueEntry
from mpctl.planning.schemas import TrainingEntry


class CostEntry(TypedDict):
    """A cost of a tensor mode: in symbols, and its value on the grid that was asked for; None where
    the ranks are none."""

    symbol: str
    value: float | None


class ModeLayerEntry(TypedDict):
    """One layer of the model, micro batch and rank, forward and backward. saved_bytes: what forward
    keeps for backward; sent_bytes: between the tensor-parallel ranks, over rings, in so many
    collectives; hops: steps of their rings; tensor_seconds: of them, as far as nothing hides
    them."""

    flops: float
    parameter_bytes: int
    saved_bytes: int
    sent_bytes: float
    collectives: int
    hops: int
    tensor_seconds: float | None


class ModeStepEntry(TypedDict):
    """One step. sent_bytes: between the tensor-parallel ranks, of a rank of the stage that sends
    most; tensor_seconds: its part of step_seconds, None where no time can be stated."""

    sent_bytes: float
    tensor_seconds: float | None
    step_seconds: float | None
    peak_bytes: int
    fits: bool | None


class TensorModeEntry(TypedDict):
    """The job in one tensor mode. axes: of its grid, None where the ranks are none; costs: by
    column; issues: why it cannot run, empty where it can; layer, step: this job's numbers."""

    tp: int
    mode: str
    depth: int | None
    axes: dict[str, int] | None
    costs: dict[str, CostEntry]
    issues: list[IssueEntry]
    layer: ModeLayerEntry | None
    step: ModeStepEntry | None


class TensorModesDocument(TypedDict):
    """Schema mpctl.tensor-modes/1: what `mpctl plan --compare-tensor-modes --json` prints.

    columns: what each column of costs means; changed: settings of the job that modes other than 1d
    do not have and that were left out for them.
    """

    schema: Literal["mpctl.tensor-modes/1"]
    job: str | None
    training: TrainingEntry
    columns: dict[str, str]
    changed: list[str]
    modes: list[TensorModeEntry]
    notes: list[str]
