"""The JSON of `mpctl plan` as types: schemas mpctl.plan/1, mpctl.rank/1, mpctl.compare/1 and
mpctl.explain/1. Sizes are in bytes, times in seconds, layers in half-open spans [first, last + 1].
"""

from __future__ import annotations

from typing import Literal, TypedDict

from mpctl.errors import IssueEntry, Status
from mpctl.planning.layout_settings import NearbyEntry

Spans = list[list[int]]  # of layers: [[0, 6], [12, 18]]
SummaryEntry = dict[str, bool | int | float | None]  # the fields of planning.summary.PlanSummary
FigureEntry = dict[str, str | float]  # the fields of estimate.figure.Figure


class StackSpans(TypedDict):
    """The layers of an encoder-decoder, by each stack's own numbers."""

    encoder: Spans
    decoder: Spans


class TrainingEntry(TypedDict):
    """How the model is trained; what a search varies is None.

    dtype_is_auto: whether the data type followed from the device. micro_batches: of a step on each
    pipeline. runtime_is_default: whether nobody named the runtime.
    """

    dtype: str
    dtype_is_auto: bool
    global_batch_size: int | None
    micro_batch_size: int | None
    micro_batches: int | None
    recompute: str | None
    zero: int | None
    runtime: str
    runtime_is_default: bool


class CheckEntry(IssueEntry):
    """A rule's answer."""

    status: Status


class GroupSummary(TypedDict):
    """The groups of one kind, where there are too many to list: first and last as examples."""

    count: int
    size: int
    first: list[int]
    last: list[int]


class HeldLayers(TypedDict, total=False):
    """The layers of a rank; stacks: of an encoder-decoder. Empty without a model."""

    layers: Spans
    stacks: StackSpans


class RankEntry(HeldLayers):
    """Where one rank sits, its coordinate along each axis, and the layers that it holds."""

    rank: int
    node: int
    local_rank: int
    coords: dict[str, int]


class TensorBlocksPart(TypedDict, total=False):
    """The blocks of a layer's product Y = X W that a rank of a tensor-parallel grid holds: by
    tensor and dimension, half-open. Empty in 1d and without a model."""

    tensor_blocks: dict[str, dict[str, list[int]]]


class RankDocument(RankEntry, TensorBlocksPart):
    """Schema mpctl.rank/1: one rank with every group that it is in."""

    schema: Literal["mpctl.rank/1"]
    world_size: int
    groups: dict[str, list[int]]


class SentEntry(TypedDict):
    """Collectives of one kind over the groups of one axis of tp's grid; ring_bytes_per_rank: what a
    rank sends on the average where every collective is a ring."""

    axis: str
    kind: str
    count: int
    volume_bytes: int
    ring_bytes_per_rank: int | float


class SentByKind(TypedDict, total=False):
    """In 2d, 2.5d and 3d, collectives by axis and kind."""

    sent: list[SentEntry]


class PartTrafficEntry(SentByKind):
    """Collectives over tp of one parallel layer; volume_phi: in all-gathers of hidden states."""

    all_reduces: int
    volume_phi: int | float
    volume_bytes: int


# Collectives over tp of one block: an entry a parallel layer, `attention`, one of `norms` where
# these send anything (2d, 2.5d, 3d), then the totals
# all_reduces, volume_phi, volume_bytes and ring_bytes_per_rank.
BlockTrafficEntry = dict[str, PartTrafficEntry | int | float]


class MessageEntry(TypedDict):
    """count equal messages of `bytes` each, which one rank takes part in; kind: of collective."""

    axis: str
    kind: str
    what: str
    bytes: int
    count: int


class DecoderTraffic(TypedDict, total=False):
    """A block of an encoder-decoder's second stack."""

    decoder_layer: BlockTrafficEntry


class CommunicationEntry(DecoderTraffic):
    """Messages. layer: a block of the first stack, one micro batch; step_by_stage: messages of a
    step of one rank of each stage; validation_by_stage: those of one validation of
    `training.eval_samples`, of the first replica."""

    phi_bytes: int
    layer: BlockTrafficEntry
    step_by_stage: list[list[MessageEntry]]
    validation_by_stage: list[list[MessageEntry]]


class StageMemoryEntry(TypedDict):
    """Bytes on one rank of a stage; `allocated_bytes` by tensors, `device_bytes` in all."""

    stage: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    working_bytes: int
    lasting_bytes: int
    slack_bytes: int
    context_bytes: int
    total_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    in_flight: int


class MemoryEntry(TypedDict):
    """Memory by stage, and the tensors of one checkpoint."""

    stages: list[StageMemoryEntry]
    checkpoint_bytes: int
    is_lower_bound: bool


class NoTimeEntry(TypedDict):
    """Why the step's time cannot be stated."""

    step_seconds: None
    reason: str


class TimeEntry(TypedDict):
    """The step's time: 9 of 10 measured steps lie between low and high; breakdown: by part."""

    step_seconds: float
    low_seconds: float
    high_seconds: float
    extrapolates: list[str]
    is_lower_bound: bool
    breakdown: dict[str, float]
    flops_per_rank: float
    model_flops_per_rank: float
    mfu: float
    hfu: float


class RanksPart(TypedDict, total=False):
    """Every rank, of a small world or where they are wanted."""

    ranks: list[RankEntry]


class StagesPart(TypedDict, total=False):
    """What only a plan with a model has: the layers of each stage."""

    stages: list[Spans]
    stage_stacks: list[StackSpans]


class RuntimeEntry(TypedDict):
    """The same layout under one runtime: an entry of `runtimes`. emit: launchers of `--emit` that
    run this software. not_run: in words, what it does not run, and then every figure is None."""

    runtime: str
    software: str
    emit: list[str]
    not_run: list[str]
    fits: bool | None
    step_seconds: float | None
    step_seconds_low: float | None
    step_seconds_high: float | None
    mfu: float | None
    device_bytes: int | None


class RuntimesPart(TypedDict, total=False):
    """The same layout under each of the runtimes of `--runtimes`."""

    runtimes: list[RuntimeEntry]


class NearestPart(TypedDict, total=False):
    """Layouts near one that does not fit, which do."""

    nearest_that_fit: list[NearbyEntry]


class EstimatePart(TypedDict, total=False):
    """What only a plan with a model has: its estimates."""

    summary: SummaryEntry
    communication: CommunicationEntry
    parameters: int
    memory: MemoryEntry
    time: TimeEntry | NoTimeEntry


class TensorGridPart(TypedDict):
    """How tp splits matrices. tensor_grid: ranks along each axis of the grid of tp ranks, the
    fastest-varying first; {"tp": t} in 1d. tensor_depth: that of 2.5d, else None."""

    tensor_mode: str
    tensor_depth: int | None
    tensor_grid: dict[str, int]


class LinkEntry(TypedDict):
    """A level of links: the node, an NVLink domain of several nodes, or a level of the fabric.
    ranks: of the job under one network of it; networks: how many there are."""

    name: str
    ranks: int
    networks: int
    oversubscription: float
    latency_seconds: float


class PlanDocument(
    TensorGridPart, RanksPart, StagesPart, NearestPart, RuntimesPart, EstimatePart
):  # fmt: skip
    """Schema mpctl.plan/1: what `mpctl plan --json` prints. within: of each kind of groups, the
    name of the innermost level of links that holds all of them; None where none does."""

    schema: Literal["mpctl.plan/1"]
    fits: bool | None
    verdict: str
    training: TrainingEntry
    world_size: int
    nodes: int
    gpus_per_node: int
    links: list[LinkEntry]
    within: dict[str, str | None]
    sizes: dict[str, int]
    order: str
    groups: dict[str, list[list[int]] | GroupSummary]
    checks: list[CheckEntry]


class CompareDocument(TypedDict):
    """Schema mpctl.compare/1: several jobs, each list with an entry a job.

    runs: whether the job's runtime runs all of its settings; the estimate is as if it did.
    warnings: those of `mpctl plan`. settings: those that differ, by full name; figures: by name:
    `seconds.tp`; `bytes.dp`: of messages; `sent_bytes.dp`: what a rank sends in a step.
    """

    schema: Literal["mpctl.compare/1"]
    jobs: list[str]
    training: list[TrainingEntry]
    fits: list[bool | None]
    runs: list[bool]
    warnings: list[list[IssueEntry]]
    settings: dict[str, list[object]]
    figures: list[dict[str, float | None]]


class ExplainDocument(TypedDict):
    """Schema mpctl.explain/1: figures with the formulas that gave them."""

    schema: Literal["mpctl.explain/1"]
    training: TrainingEntry
    figures: list[FigureEntry]
