"""Records of one rank: one for every step, a report at its end, one for its failure.

Records are lines of RUN/metrics.jsonl, written by rank 0. Every rank writes RUN/ranks/rank-N.json
when it has finished, or leaves a FailureRecord in its breadcrumb (breadcrumb.py) when an exception
ended it. A rank that was killed leaves neither; its breadcrumb then has what it was doing.

Bytes are bytes, times are seconds, `coords` are a rank's coordinates by axis, {"tp": 1, "pp": 0}.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.records.checkpoint.folder import SaveTimes

Pass = Literal["forward", "backward", "recompute", "step"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "recompute", "step")
"""step: what is done once a step, outside of the passes of micro batches."""


class RequiredStepFields(TypedDict):
    """Keys of every record: a line without one of these is not read as a record.

    step: the number of updates so far, from 1, skipped ones included; loss: the mean over the
    samples of the global batch, None where it was not finite and the step was skipped; tokens:
    trained on so far; tokens_per_second: of this step.
    """

    step: int
    loss: float | None
    tokens: int
    step_seconds: float
    tokens_per_second: float


class RoutingFigures(TypedDict, total=False):
    """Keys of the record of a model with experts.

    aux_loss: the losses that balance their load, with their factors, which `loss` does not include;
    expert_load, rank_load: the tokens of the fullest expert, and of the fullest rank of ep, over
    the mean, averaged over the layers (train/runtime/routing.py); near_ties: choices of experts that
    rounding could have made otherwise.
    """

    aux_loss: float
    expert_load: float
    rank_load: float
    near_ties: int


class StepRecord(RequiredStepFields, RoutingFigures, total=False):
    """One line of metrics.jsonl.

    time: seconds since 1970 when it was written; cpu_seconds: processor time of rank 0 in the step;
    grad_norm: before clipping, None where it was not finite; skipped: true where no parameter was
    changed, because fp16 overflowed or for skip_reason; memory_bytes: peak memory by rank, until
    this step's gradients were summed; validation_loss: after this step, where one was due;
    validation_losses: of further corpora by name; initial_*: before the first step, in the record
    of step 1. save_stall_seconds: how long training waited for saving since the record before;
    save_seconds: duration of the save that was published meanwhile. communication_seconds: by axis,
    how long rank 0 was in collectives during the step and computed nothing (train/transport/timing.py),
    {"dp_cp": 0.003, "tp": 0.02}; empty of one rank, absent in records of older versions.
    reserved_memory_bytes: the most that torch's allocator on rank 0 has taken from its GPU; mfu,
    hfu: model and hardware FLOP of a rank in the step over what its device's data sheet promises
    for that time (plan/estimate/flops.py); these three are absent where they are not known. People may
    add keys; readers keep every number that they find.
    """

    time: float
    cpu_seconds: float
    grad_norm: float | None
    learning_rate: float
    loss_scale: float
    skipped: bool
    skip_reason: str
    memory_bytes: list[int]
    predicted_step_seconds: float | None
    validation_loss: float
    validation_losses: dict[str, float]
    initial_validation_loss: float
    initial_validation_losses: dict[str, float]
    save_stall_seconds: float
    save_seconds: float
    communication_seconds: dict[str, float]
    reserved_memory_bytes: int
    mfu: float
    hfu: float


def loss_text(record: StepRecord, digits: int = 6) -> str:
    """`loss 2.345678`; of a skipped step `skipped: the loss of step 7 is nan`."""
    if reason := record.get("skip_reason"):
        return f"skipped: {reason}"
    loss = record["loss"]
    return "loss unknown" if loss is None else f"loss {loss:.{digits}f}"


class TrafficTotals(TypedDict):
    """The collectives of one axis and kind: how many, and their bytes together."""

    count: int
    bytes: int


Traffic = dict[str, TrafficTotals]
"""By axis and kind: {"tp all_reduce": {"count": 12, "bytes": 3145728}}."""


class ValidationReport(TypedDict):
    """The last validation: samples of each corpus, and the collectives of all of them together."""

    samples: list[int]
    traffic: Traffic


class RankReport(TypedDict):
    """RUN/ranks/rank-N.json, what a rank measured, to be compared with the plan.

    step_memory: bytes of one steady step by kind (parameters, gradients, optimizer, activations,
    peak); a kind that could not be counted is None, and all are absent when no step was watched.
    saves: of this attempt. communication_seconds: by axis, medians of how long the rank was in
    collectives in a step and computed nothing; communication_share: the median of their sum over
    the step's duration; both over the last steps of this attempt without its first
    (train/runtime/step_record.py). reserved_memory_bytes: the most that torch's allocator has taken from
    the GPU, and device: the GPU's name as torch reports it; None on a CPU. attention: what computes
    attentions, such as cuDNN's kernel. Older versions wrote none of these, nor saves.
    """

    rank: int
    coords: dict[str, int]
    steps: int
    parameters: int
    peak_memory_bytes: int
    step_memory: dict[str, int | None]
    step_traffic: Traffic
    validation: ValidationReport | None
    saves: NotRequired[list[SaveTimes]]
    communication_seconds: NotRequired[dict[str, float]]
    communication_share: NotRequired[float]
    reserved_memory_bytes: NotRequired[int | None]
    device: NotRequired[str | None]
    attention: NotRequired[list[str]]


LOST_PEER_TEXTS = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "socket closed",
    "connection refused",
    "remote process exit",
    "application timeout",
    "unexpected exit of a remote peer",
    "connection closure by a peer",
    "closed by remote peer",
    "connection was likely closed",
    "nccl communicator was aborted",
    "wait timeout",
    "timed out",
)
"""Parts of messages of torch's process groups and stores, gloo and NCCL about a lost or late
peer."""


class FailureRecord(TypedDict):
    """Record of the exception that ended a rank.

    doing: step, stage and micro batch at that moment; is_echo: the error only reports a lost peer,
    so the cause is elsewhere; time: seconds since 1970. rollback: the step to leave out when
    training restarts from the newest checkpoint; damaged: the folder of a corrupted checkpoint; both
    are absent for other failures.
    """

    rank: int
    coords: dict[str, int]
    doing: str
    error: str
    is_echo: bool
    time: float
    traceback: list[str]
    rollback: NotRequired[int]
    damaged: NotRequired[str]


class RehearsalFailure(TypedDict):
    """Failure that would end a rank's step: error, activity of the rank, lines of the traceback."""

    error: str
    doing: str
    traceback: list[str]


class RehearsedRankHead(TypedDict):
    """Fields of every rank that was rehearsed; failure is None when its step succeeded."""

    rank: int
    coords: dict[str, int]
    failure: RehearsalFailure | None
    micro_batches: int
    micro_batches_run: int
    seconds: float


class RehearsedRank(RehearsedRankHead, total=False):
    """One line that `python -m mpctl.train.rehearsal.worker` prints. A rank that failed has only the
    fields of RehearsedRankHead.

    activation_bytes: most activations held at once; at_peak: bytes by kind at the step's peak;
    building_bytes: peak memory while the model is built; host_syncs: where the step would make the
    host wait for a CUDA device, except to read its figures once, as `file:line: why`; audit: what
    the step launches and moves, where it was asked for.
    """

    parameters: int
    step_traffic: Traffic
    state_bytes: dict[str, int]
    activation_bytes: int
    peak_bytes: int
    at_peak: dict[str, int]
    building_bytes: int
    host_syncs: list[str]
    audit: StepAudit


class AuditFigures(TypedDict):
    """launches: kernels started; bytes: what they read and wrote; least_bytes: each tensor that
    comes in from elsewhere read once and each that is needed later written once; flops: of matrix
    products and attention; seconds: on the job's device, and least_seconds: of one kernel a product
    and least_bytes; None where the device's speed is not known."""

    launches: float
    bytes: float
    least_bytes: float
    flops: float
    seconds: float | None
    least_seconds: float | None


class AuditRow(AuditFigures):
    """A module in a pass. times: how many such a step has; operations: launches by operation of
    torch, the most first."""

    module: str
    phase: Pass
    times: float
    operations: dict[str, float]


class AuditTotal(AuditFigures):
    """All rows of one kind of layer (`layers.*`), or of all that is not in a layer, in one pass:
    one layer of one micro batch, or all that a step does there."""

    part: str
    phase: Pass


class StepAudit(TypedDict):
    """An audit of one rank's step. rows: the largest loss first; totals: a layer of each kind, and
    the rest of the step; unknown: operations of torch with an unknown number of kernels, counted as
    one each; assumption: how the seconds are computed."""

    rows: list[AuditRow]
    totals: list[AuditTotal]
    unknown: list[str]
    assumption: str
