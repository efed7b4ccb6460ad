"""A runtime profile: what an estimate assumes of a training software.

Which layouts it runs, how often it reads and writes which tensor, what it overlaps, what its host
spends on launching kernels, what it holds in memory. `training.runtime` names a preset of
runtimes; its figures come from the software's sources and papers, those under [host] and [overlap]
from a fit to published runs. No figure depends on a model.
"""

from functools import cache
from typing import Annotated, Literal

from pydantic_core import ValidationError

from mpctl.axes import Axis
from mpctl.errors import InputError
from mpctl.spec.base import (
    AS_MEMORY,
    Amount,
    Bounded,
    Count,
    DType,
    Field,
    Part,
    Seconds,
    Share,
    StrictModel,
)
from mpctl.spec.parallel import ScheduleName, TensorMode
from mpctl.spec.presets import get_file, preset_issues, search_path
from mpctl.spec.training import RecomputeMode

OWN_RUNTIME = "mpctl"  # the profile of the software that `mpctl launch` starts


class MemoryPasses(StrictModel):
    """How often a tensor is read or written in one micro batch; a gelu on its own reads once and
    writes once, which is 2."""

    forward: Amount = Field("reads and writes of the tensor in forward")
    backward: Amount = Field("reads and writes of the tensor in backward")


class AcceleratorPasses(StrictModel):
    """Passes of a software that has kernels of its own on accelerators; absent ones are as on a
    CPU."""

    dropout: MemoryPasses | None = Field("as operators.dropout, on an accelerator", None)
    logits: MemoryPasses | None = Field("as operators.logits, on an accelerator", None)


class OperatorCosts(StrictModel):
    """Operations that memory bandwidth bounds, in one micro batch: seconds are bytes over
    bandwidth."""

    hidden: MemoryPasses = Field(
        "passes over the hidden states, a sublayer: norm, dropout, residual"
    )
    dropout: MemoryPasses = Field(
        "further passes over the hidden states where training.dropout is above 0",
        MemoryPasses(forward=0, backward=0),
    )
    width: MemoryPasses = Field(
        "passes over q, k, v and context: splits, rotations, transposes, biases"
    )
    inner: MemoryPasses = Field("passes over the MLP's inner tensor: activation, bias")
    scores: MemoryPasses = Field(
        "passes over the score matrix where it is held: scale, mask, softmax"
    )
    logits: MemoryPasses = Field("bytes moved for a logit: casts and the loss")
    gradient_bytes: Amount = Field(
        "bytes moved to accumulate the gradient of a parameter, a micro batch"
    )
    optimizer_bytes: Amount = Field(
        "bytes moved by the optimizer for each parameter that a rank updates"
    )
    cast_bytes: Amount = Field("bytes moved to cast an element of an fp8 product's operands", 0.0)
    casts_weights: Literal["step", "pass"] = Field(
        "how often weights are cast: once a step, or in every forward and backward", "step"
    )
    flash: Part = Field("speed of its flash attention's forward over the device's", 1.0)
    flash_backward: Part = Field("speed of its flash attention's backward over the device's", 1.0)
    recompute: Literal["core", "half"] = Field(
        "what selective recomputation repeats: attention scores (core), or every "
        "other product (half)",
        "core",
    )
    stops_early: bool = Field("recomputation ends at the last tensor that backward needs", False)
    accelerator: AcceleratorPasses = Field(
        "figures in place of these where the job's device is no CPU", AcceleratorPasses()
    )

    def on(self, is_accelerator: bool, name: Literal["dropout", "logits"]) -> MemoryPasses:
        """The passes of an operation on an accelerator or on a CPU.

        By hand, of mpctl: dropout's forward is 0.5 on an accelerator, 15 on a CPU.
        """
        own: MemoryPasses | None = getattr(self.accelerator, name) if is_accelerator else None
        usual: MemoryPasses = getattr(self, name)
        return usual if own is None else own


class OverlapShares(StrictModel):
    """The share of each kind of message that is sent while something is computed; never more than
    fits into that time."""

    tp: Share = Field("share of a column product's gradient sum hidden by its weights' gradient")
    products: Share = Field(
        "share of sequence parallelism's gathers and scatters that go in pieces beside "
        "the product that needs or makes them",
        0.0,
    )
    cp: Share = Field("share of messages of keys and values hidden by attention's own kernels", 0.0)
    pp: Share = Field("share of a message between stages hidden by their work")
    dp: Share = Field("share of gradients and parameters hidden by the last backward")
    gather: Share | None = Field(
        "share of the parameters that ZeRO 1 and 2 gather once a step hidden by the "
        "next forward; when absent they are hidden as gradients are",
        None,
    )
    zero: Share = Field("share of ZeRO-3's gathers and scatters hidden by each layer's work", 0.0)
    drag: Amount = Field(
        "extra time of products beside a message, as a fraction of the overlap", 0.0
    )
    keeps: bool = Field(
        "in a pipeline, ZeRO-3's parameters stay gathered from the first micro batch "
        "to the last, and gradients are scattered once",
        False,
    )
    buckets: bool = Field(
        "gradients are reduced in buckets of parallel.bucket_bytes, padded to "
        "equal slices; else all of a stage in one message, or a layer's where ZeRO sends in every "
        "micro batch",
        False,
    )
    scatters: bool = Field(
        "tp ranks each send a part of a message between stages, then gather it", False
    )


class HostCosts(StrictModel):
    """Seconds of the host thread that launches kernels; a step waits for it where it takes longer
    than the kernels."""

    layer: Seconds = Field(
        "host time of a layer's forward, seconds; its backward takes twice as long"
    )
    split: Seconds = Field(
        "further host time of a layer's forward that is split over tp, seconds", 0.0
    )
    micro_batch: Seconds = Field(
        "host time of a stage besides its layers, seconds a micro batch", 0.0
    )
    message: Seconds = Field("host time at either end of a message between stages, seconds", 0.0)
    sync: Amount = Field(
        "extra host time of a layer at tp 8, as a fraction; it scales as tp cubed", 0.0
    )
    rank_in_pipeline: Seconds = Field(
        "further host time of a layer's forward for each rank of its tp group, where a "
        "pipeline crosses nodes, seconds; twice as much in backward",
        0.0,
    )
    step: Seconds = Field("host time once a step, seconds", 0.0)


class FittedRuns(StrictModel):
    """The runs that the figures were fitted to: beyond them an estimate is an extrapolation."""

    devices: list[str] = Field("devices of those runs", list)
    clusters: list[str] = Field("clusters of those runs", list)
    dtypes: list[DType] = Field("data types of those runs", list)
    gpus: Count = Field("GPUs of the largest run", 1)
    parameters: Annotated[float, Bounded(ge=1, le=1e18)] = Field(
        "parameters of the largest model", 1
    )


ZeroStage = Annotated[int, Bounded(ge=0, le=3)]


class RuntimeSupport(StrictModel):
    """Layouts that a training software runs, from its papers and sources; the default is what every
    pipeline of 1F1B runs.

    A search of a job tries what its runtime runs and nothing else; `mpctl launch` refuses
    what rules/launched.py and the rules of each limit refuse.
    """

    launched: bool = Field(
        "whether `mpctl launch` runs what is planned under this profile; false for "
        "other software, which is only planned",
        False,
    )
    emit: list[str] = Field(
        "launchers of `mpctl plan --emit` that run this software; what is emitted for "
        "one of them is planned under this profile",
        [],
    )
    kinds: list[str] = Field(
        "kinds of device that it runs on (cuda, rocm, ...); any when empty", list
    )
    schedules: Annotated[list[ScheduleName], Bounded(min_length=1)] = Field(
        "pipeline schedules that a search tries, each with one chunk a stage", ["1f1b"]
    )
    chunks: bool = Field("several chunks a stage, interleaved (parallel.vpp)", False)
    recompute: Annotated[list[RecomputeMode], Bounded(min_length=1)] = Field(
        "values of training.recompute", ["none", "full"]
    )
    sequence: bool = Field("sequence parallelism", False)
    context: bool = Field("context parallelism (parallel.cp above 1)", False)
    zero: Annotated[list[ZeroStage], Bounded(min_length=1)] = Field(
        "ZeRO stages; the first where dp x cp is 1", [0]
    )
    tensor_modes: list[TensorMode] = Field(
        "values of parallel.tensor_mode; empty where tp is always 1", ["1d"]
    )
    pipeline: bool = Field("pipeline parallelism (parallel.pp above 1)", True)
    by_cost: bool = Field("stages of equal compute (parallel.stage_balance)", False)
    ends_as_layers: bool = Field(
        "where layers do not divide over the stages, embedding and loss count as a "
        "layer each, if that divides",
        False,
    )
    fills_stages: bool = Field(
        "a stage takes layers, and at last head and loss, until the cost of all so far "
        "passes its share (pipeline/filled.py); else stages hold equal numbers of layers",
        False,
    )
    needs_full_pipeline: bool = Field(
        "it refuses fewer micro batches than stages before the last, and, where "
        "replicas reduce gradients, stages without a parameter",
        False,
    )
    orders: list[str] = Field("orders of ranks that it has (parallel.order); any when empty", list)
    dtypes: list[DType] = Field("data types that it trains in; all when empty", list)

    @property
    def is_used_today(self) -> bool:
        """Whether mpctl launches what is planned under this profile, or writes it for a launcher;
        older software can only be planned for."""
        return self.launched or bool(self.emit)

    def runs_on(self, kind: str | None) -> bool:
        """Whether it runs on devices of this kind; None: the kind is not known."""
        return kind is None or not self.kinds or kind in self.kinds

    def has_axis(self, axis: Axis) -> bool:
        """Whether it runs several ranks along an axis of parallelism."""
        return not axis.supported_by or bool(getattr(self, axis.supported_by))

    @property
    def tensor(self) -> bool:
        """Whether it runs tensor parallelism (parallel.tp above 1)."""
        return bool(self.tensor_modes)


class RuntimeMemory(StrictModel):
    """Memory that a training software takes besides what every training does, from its sources
    where not said otherwise; no figure depends on a model."""

    kernels: str = Field(
        "kernels whose saved activations are counted: mpctl, megatron, eager (as "
        "megatron, without fused activations) or half (torchtitan's, which recompute every second "
        "matrix product)",
        "mpctl",
    )
    parameter_dtype: DType | None = Field(
        "data type of the only copy of parameters, which the optimizer updates; with "
        "master copies when absent",
        None,
    )
    gradient_bytes: dict[DType, Amount] = Field(
        "bytes of a gradient by training.dtype, unless training.gradient_dtype is "
        "narrower than fp32; the reduced dtype's when absent",
        dict,
    )
    assumes_dropout: bool = Field(
        "dropout counts as on where scores are held: the software's default", False
    )
    logit_bytes: Amount = Field(
        "bytes held for a logit during the loss, beside the logit itself", 0.0
    )
    weight_gradients: Literal["one", "layer"] = Field(
        "weight gradients held at once in backward: the largest one, or a layer's", "one"
    )
    reduction_bytes: Amount = Field(
        "bytes held for a gradient besides, where replicas reduce them: DDP's buckets", 0.0
    )
    gather_buffers: Amount = Field(
        "hidden states of a micro batch, gathered over tp, that buffers of "
        "asynchronous tensor parallelism hold all the time",
        0.0,
    )
    slack: Part = Field("bytes that the allocator reserves for an allocated byte", 1.0)
    context_bytes: Annotated[float, Bounded(ge=0, le=1e12), AS_MEMORY] = Field(
        "bytes of the device's libraries, outside of the allocator", 0.0
    )
    source: str = Field("where the figures come from", "")


class RuntimeProfile(StrictModel):
    """What an estimate assumes of a training software: a preset of runtimes."""

    name: str = Field("the software")
    runs: RuntimeSupport = Field("the layouts that it runs", RuntimeSupport)
    gradient_dtype: DType | None = Field(
        "data type in which gradients are reduced; the job's when absent", None
    )
    operators: OperatorCosts = Field("operations bound by memory bandwidth")
    overlap: OverlapShares = Field("what is sent while something is computed")
    host: HostCosts = Field("time of the host thread")
    spread: Part = Field(
        "spread of log(measured / estimated) where the cluster was measured: 9 of 10 "
        "lie within 1.645 of it"
    )
    spread_apart: Part = Field("the same where the cluster was not measured")
    widening: Annotated[float, Bounded(ge=1, le=10)] = Field(
        "by how much each further respect in which a job lies outside widens both", 1.26
    )
    seen: FittedRuns = Field("runs that the figures were fitted to", FittedRuns)
    memory: RuntimeMemory = Field("what it holds in memory", RuntimeMemory)
    source: str = Field("where the figures come from")


def get_profile(name: str) -> RuntimeProfile:
    """The runtime preset that `training.runtime` names.

    Raises InputError where there is none of this name, or its file is wrong: then with the file,
    and an issue for each key of it that is."""
    return _read_profile(name, search_path())


@cache
def _read_profile(name: str, search_path: tuple[str, ...]) -> RuntimeProfile:
    """Read once for each place that a name may be found in."""
    file = get_file("runtimes", name, where="training.runtime")
    try:
        return RuntimeProfile.model_validate(file.read())
    except ValidationError as error:
        raise InputError(preset_issues(error, file, RuntimeProfile)) from None


def is_launched(runtime: str) -> bool:
    """Whether `mpctl launch` runs what is planned under this runtime, whose name a job gives."""
    return get_profile(runtime).runs.launched
