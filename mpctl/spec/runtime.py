"""A runtime profile: what an estimate assumes about a training software.

It says which layouts the software runs, how often it moves each tensor, what it overlaps, the
host's time to launch kernels, and the memory held. `training.runtime` names a preset of
runtimes; its figures come from the software's sources and papers, those under [host] and [overlap]
from a fit to published runs. No figure depends on a model.
"""

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import Field, ValidationError

from mpctl.core.axes import Axis
from mpctl.core.errors import InputError
from mpctl.spec.adapter_costs import AdapterCosts as AdapterCosts
from mpctl.spec.adapter_costs import Bandwidth
from mpctl.spec.adapter_costs import MemoryPasses as MemoryPasses
from mpctl.spec.base import Amount, Count, DType, Factor, Part, Seconds, Share, StrictModel
from mpctl.spec.parallel import CpComm, ScheduleName, TensorMode
from mpctl.spec.presets import PresetFile, get_file, own_folders, preset_issues, search_path
from mpctl.spec.runtime_memory import RuntimeMemory
from mpctl.spec.schedules import SCHEDULES
from mpctl.spec.training import DEFAULT_RUNTIME, CrossEntropy, RecomputeMode, TrainingSpec
from mpctl.spec.training import Dispatcher as Dispatcher


class AcceleratorPasses(StrictModel):
    """Passes of software that uses other kernels on accelerators; absent ones are as on a CPU."""

    hidden: MemoryPasses | None = Field(None, description="as operators.hidden, on an accelerator")
    dropout: MemoryPasses | None = Field(None, description="as operators.dropout, on an accelerator")
    width: MemoryPasses | None = Field(None, description="as operators.width, on an accelerator")
    inner: MemoryPasses | None = Field(None, description="as operators.inner, on an accelerator")
    logits: MemoryPasses | None = Field(None, description="as operators.logits, on an accelerator")
    kernels: MemoryPasses | None = Field(None, description="as operators.kernels, on an accelerator")
    gradient_bytes: Amount | None = Field(
        None,
        description="as operators.gradient_bytes, on an accelerator, of a matrix whose gradient is "
        "a product of 16-bit operands in backward",
    )
    optimizer_bytes: Amount | None = Field(None, description="as operators.optimizer_bytes, on an accelerator")


class OperatorCosts(StrictModel):
    """Operations that memory bandwidth bounds, in one micro batch: seconds are bytes over
    bandwidth."""

    hidden: MemoryPasses = Field(description="passes over the hidden states for each sublayer: norm, dropout, residual")
    dropout: MemoryPasses = Field(
        MemoryPasses(forward=0, backward=0),
        description="further passes over the hidden states where training.dropout is above 0",
    )
    width: MemoryPasses = Field(description="passes over q, k, v and context: splits, rotations, transposes, biases")
    inner: MemoryPasses = Field(description="passes over the MLP's inner tensor: activation, bias")
    scores: MemoryPasses = Field(description="passes over the score matrix where it is held: scale, mask, softmax")
    logits: MemoryPasses = Field(description="bytes moved for a logit: casts and the loss")
    kernels: MemoryPasses = Field(
        MemoryPasses(forward=0, backward=0),
        description="kernels of a layer beside products and attention, of a launch each",
    )
    gradient_bytes: Amount = Field(description="bytes moved to accumulate the gradient of a parameter, a micro batch")
    optimizer_bytes: Amount = Field(description="bytes moved by the optimizer for each parameter that a rank updates")
    cast_bytes: Amount = Field(0.0, description="bytes moved to cast an element of an fp8 product's operands")
    tensorwise_passes: Amount = Field(
        0.0,
        description="further reads of an element of an fp8 product's operands, for the largest one of "
        "a tensor (training.fp8_recipe tensorwise)",
    )
    exchanges_amax: bool = Field(
        False,
        description="all ranks exchange the largest elements of fp8 operands once a step (training.fp8_recipe delayed)",
    )
    casts_weights: Literal["step", "pass", "held"] = Field(
        "step",
        description="how often weights are cast: once a step; in every forward and backward; held: "
        "once a step, and kept, where it has several micro batches and parameters are not gathered "
        "for each (ZeRO 3)",
    )
    flash: Part = Field(1.0, description="speed of flash attention's forward relative to the device's")
    flash_backward: Part = Field(1.0, description="speed of flash attention's backward relative to the device's")
    flash_narrow: Part = Field(
        1.0,
        description="speed of flash attention in jobs of fp8, mxfp8 and nvfp4 relative to that of 16 bits: above 1 "
        "if the software computes it in fp8",
    )
    recompute: Literal["core", "second-products"] = Field(
        "core",
        description="what selective recomputation repeats: attention scores (core), or every other product "
        "(second-products)",
    )
    stops_early: bool = Field(False, description="recomputation ends at the last tensor that backward needs")
    accelerator: AcceleratorPasses = Field(
        AcceleratorPasses(), description="figures that replace these where the job's device is not a CPU"
    )

    def on(self, is_accelerator: bool) -> "OperatorCosts":
        """These figures on an accelerator or on a CPU.

        By hand, of mpctl: dropout's forward is 0.5 on an accelerator, 15 on a CPU.
        """
        if not is_accelerator:
            return self
        stated = {name: own for name, own in self.accelerator if own is not None}
        return self.model_copy(update=stated)


class OverlapShares(StrictModel):
    """The share of each kind of message that is sent during computation; never more than fits into
    that time."""

    tp: Share = Field(description="share of a column product's gradient sum hidden by its weights' gradient")
    products: Share = Field(
        0.0,
        description="share of sequence parallelism's gathers and scatters that are sent in pieces "
        "during the product that needs or makes them",
    )
    gathers_in_halves: bool = Field(
        False,
        description="with parallel.tp_comm_overlap a column product multiplies the first half of its "
        "input while the second half is gathered",
    )
    cp: Share = Field(0.0, description="share of messages of keys and values hidden by attention's kernels")
    pp: Share = Field(description="share of a message between stages hidden by their work")
    dp: Share = Field(description="share of gradients and parameters hidden by the last backward")
    gather: Share | None = Field(
        None,
        description="share of the parameters that ZeRO 1 and 2 gather once a step hidden by the "
        "next forward; when absent they are hidden as gradients are",
    )
    zero: Share = Field(0.0, description="share of ZeRO-3's gathers and scatters hidden by each layer's work")
    drag: Amount = Field(0.0, description="extra time of products during a message, as a fraction of the overlap")
    keeps: bool = Field(
        False,
        description="in a pipeline, ZeRO-3's parameters stay gathered from the first micro batch "
        "to the last, and gradients are scattered once",
    )
    buckets: bool = Field(
        False,
        description="gradients are reduced in buckets of parallel.bucket_bytes, padded to "
        "equal slices; else all of a stage in one message, or one layer's where ZeRO sends in "
        "every micro batch",
    )
    chained: bool = Field(
        False,
        description="in a pipeline nothing hides ZeRO 0's sums of gradients, and a stage's waits for the next stage's",
    )
    scatters: bool = Field(False, description="tp ranks each send a part of a message between stages, then gather it")


class HostCosts(StrictModel):
    """Seconds of the host thread that launches kernels; a step waits for it where it takes longer
    than the kernels."""

    layer: Seconds = Field(description="host time of a layer's forward, seconds; its backward takes twice as long")
    split: Seconds = Field(0.0, description="further host time of a layer's forward that is split over tp, seconds")
    gather: Seconds = Field(0.0, description="further host time of a layer's forward under ZeRO 3, seconds")
    micro_batch: Seconds = Field(
        0.0, description="host time of a stage outside of its layers, seconds for each micro batch"
    )
    message: Seconds = Field(0.0, description="host time at either end of a message between stages, seconds")
    sync: Amount = Field(0.0, description="extra host time of a layer at tp 8, as a fraction; it scales as tp cubed")
    rank_in_pipeline: Seconds = Field(
        0.0,
        description="further host time of a layer's forward for each rank of its tp group, if the "
        "pipeline crosses nodes, seconds; twice as much in backward",
    )
    step: Seconds = Field(0.0, description="host time once for each step, seconds")
    accelerator_step: Seconds | None = Field(None, description="as host.step, where the job's device is not a CPU")
    update: Seconds = Field(
        0.0,
        description="seconds in which a rank updates an element of offloaded states by torch's AdamW, inside the "
        "optimizer's step; 0: one kernel at cluster.host_bandwidth, gradients come during backward",
    )

    def step_on(self, is_accelerator: bool) -> float:
        """Seconds once a step on an accelerator or on a CPU."""
        own = self.accelerator_step if is_accelerator else None
        return self.step if own is None else own


class ExpertCosts(StrictModel):
    """Layers with experts: how tokens reach them, and what that costs besides the bytes. Software
    that was not measured has the figures of Megatron-Core."""

    dispatcher: Dispatcher = Field(
        "alltoall", description="how tokens are sent to experts where the job does not say it"
    )
    permute: MemoryPasses = Field(
        MemoryPasses(forward=13.5, backward=20.2),
        description="passes over the rows of all experts' tokens, of hidden size: permutations, "
        "weights, the sum over a token's experts",
    )
    inner: MemoryPasses = Field(
        MemoryPasses(forward=1.5, backward=2.5),
        description="passes over what experts compute of them: activation, and the weights where they apply to it",
    )
    biased: MemoryPasses = Field(
        MemoryPasses(forward=14.0, backward=20.0),
        description="passes over the results of experts whose products have biases: each bias times its token's weight "
        "in float32, added, put together and rounded by kernels of their own",
    )
    grouped: Part = Field(
        0.7, description="speed of the products of several experts relative to single ones of the same tiles"
    )
    exchange: Part = Field(1.0, description="share of a link's bandwidth for rings that an all-to-all reaches")
    once: Part = Field(1.0, description="the same of dispatchers that send once to a rank (deepep, hybridep)")
    hidden: Share = Field(0.0, description="share of the messages of rows that is sent during computation")
    beside: Share = Field(
        0.0,
        description="share of the rows on their way to experts, and of their gradients on the way "
        "back, that is sent while the shared experts' products run",
    )
    overlapped: Share = Field(
        0.65,
        description="share of what `hidden` leaves of the messages of rows, and of `wait`, that training.moe_overlap "
        "sends while another micro batch is computed",
    )
    wait: Seconds = Field(
        1e-3,
        description="seconds that an accelerator stands still in a layer's forward, and in its "
        "backward, as the host reads how many rows each expert has before it launches more",
    )
    sums_tokens: bool = Field(False, description="tokens of each expert are summed over all ranks once a step")
    balances_by_step: bool = Field(
        False,
        description="training.moe_load_balancing global counts all samples of the step before, in any "
        "layout; else the samples of a step so far, in the order of micro batches",
    )
    spread: Part = Field(
        0.23, description="as the profile's spread, of steps with experts; the larger of the two counts"
    )


class FittedRuns(StrictModel):
    """The runs that the figures were fitted to; for other jobs an estimate is an extrapolation."""

    devices: list[str] = Field(default_factory=list, description="devices of those runs")
    clusters: list[str] = Field(default_factory=list, description="clusters of those runs")
    links: dict[str, Annotated[list[Bandwidth], MinLen(2)]] = Field(
        default_factory=dict,
        description="bytes/s inside a node and between nodes in each of these clusters; the same "
        "name over other links is another cluster",
    )
    step_factors: dict[str, Factor] = Field(
        default_factory=dict,
        description="cluster.step_factor that own runs found on each of these clusters, for plans "
        "on one whose table does not state it, or on a device alone, by its name; 1 when absent",
    )
    layer_factors: dict[str, dict[str, Factor]] = Field(
        default_factory=dict,
        description="seconds of layers of one shape on a rank, relative to the figures', that own "
        "runs found on each of these clusters",
    )
    dtypes: list[DType] = Field(default_factory=list, description="data types of those runs")
    gpus: Count = Field(1, description="GPUs of the largest run")
    parameters: Annotated[float, Ge(1), Le(1e18)] = Field(1, description="parameters of the largest model")


ZeroStage = Annotated[int, Ge(0), Le(3)]


class RuntimeSupport(StrictModel):
    """Layouts that a training software runs, from its papers and sources; the defaults are what
    every 1F1B pipeline runs.

    A search of a job tries what its runtime runs and nothing else; `mpctl launch` refuses
    what plan/rules/launched.py and the rules of each limit refuse.
    """

    launched: bool = Field(
        False,
        description="whether mpctl's own layers run what is planned under this profile; false for other software, "
        "which `mpctl launch` starts by launch.program alone",
    )
    emit: list[str] = Field(
        [],
        description="launchers of `mpctl plan --emit` that run this software; a plan that is "
        "emitted for one of them uses this profile",
    )
    deepspeed: bool = Field(False, description="DeepSpeed shards its runs, which files for a Trainer then say")
    kinds: list[str] = Field([], description="kinds of device that it runs on (cuda, rocm, ...); any when empty")
    needs: DType | None = Field(
        None,
        description="it is what its launchers run on devices that multiply this data type (nvfp4: Blackwell), and "
        "offered for no others; all when absent",
    )
    schedules: Annotated[list[ScheduleName], MinLen(1)] = Field(
        ["1f1b"], description="pipeline schedules that a search tries, each with one chunk a stage, a V with two"
    )
    chunks: bool = Field(False, description="several chunks per stage, interleaved (parallel.vpp)")
    recompute: Annotated[list[RecomputeMode], MinLen(1)] = Field(
        ["none", "full"], description="values of training.recompute"
    )
    sequence: bool = Field(False, description="sequence parallelism")
    context: bool = Field(False, description="context parallelism (parallel.cp above 1)")
    cp_comm: list[CpComm] = Field(
        [], description="values of parallel.cp_comm that it runs, its default first; any when empty"
    )
    repeats_kv_heads: bool = Field(
        False, description="a2a of more ranks than kv heads: each is repeated for the ranks that share it"
    )
    zero: Annotated[list[ZeroStage], MinLen(1)] = Field([0], description="ZeRO stages")
    muon: bool = Field(False, description="training.optimizer muon, layer-wise where ranks share states")
    zero_sizes: bool = Field(False, description="ZeRO over a part of dp x cp (parallel.zero_size; HSDP)")
    zero_over_cp: bool = Field(False, description="each of these groups has all of cp: zero_size is a multiple of it")
    tensor_modes: list[TensorMode] = Field(
        ["1d"], description="values of parallel.tensor_mode; empty where tp is always 1"
    )
    pipeline: bool = Field(True, description="pipeline parallelism (parallel.pp above 1)")
    experts: bool = Field(False, description="expert parallelism (parallel.ep above 1)")
    expert_overlap: bool = Field(
        False, description="one micro batch's rows sent to experts while another is computed (training.moe_overlap)"
    )
    expert_tensor: bool = Field(False, description="tensor parallelism of experts (parallel.etp above 1)")
    by_cost: bool = Field(False, description="stages of equal compute (parallel.stage_balance)")
    layouts: bool = Field(False, description="explicit pipeline layouts (parallel.pipeline_layout)")
    ends_as_layers: bool = Field(
        False,
        description="if layers do not divide over the stages, embedding and loss count as a layer "
        "each, provided that the sum divides",
    )
    fills_stages: bool = Field(
        False,
        description="a stage takes layers, after them head and loss, until the cost so far "
        "passes its share (model/pipeline/filled.py); else stages hold equal numbers of layers",
    )
    needs_full_pipeline: bool = Field(
        False,
        description="it refuses fewer micro batches than pp - 1, and, where replicas reduce "
        "gradients, stages without a parameter",
    )
    cross_entropy: list[CrossEntropy] = Field(
        ["unfused", "fused"], description="values of training.cross_entropy that it runs"
    )
    tiled_mlp: bool = Field(False, description="MLPs in tiles of the tokens (training.tiled_mlp)")
    orders: list[str] = Field([], description="orders of axes that it supports (parallel.order); any when empty")
    dtypes: list[DType] = Field([], description="data types that it trains in; all when empty")

    @property
    def is_used_today(self) -> bool:
        """Whether mpctl launches what is planned under this profile, or writes it for a launcher;
        older software can only be planned for."""
        return self.launched or bool(self.emit)

    def runs_on(self, kind: str | None) -> bool:
        """Whether it runs on devices of this kind; None: the kind is not known."""
        return kind is None or not self.kinds or kind in self.kinds

    def is_for(self, dtypes: Collection[str] | None) -> bool:
        """Whether it is offered for devices that multiply these data types; None: the device is not known."""
        return self.needs is None or dtypes is None or self.needs in dtypes

    def has_schedule(self, name: ScheduleName, chunks: int) -> bool:
        """Whether it runs a schedule of more than one stage; several chunks that are not a V are one
        schedule, interleaved."""
        return name in self.schedules or (chunks > 1 and not SCHEDULES[name].is_v)

    def has_axis(self, axis: Axis) -> bool:
        """Whether it runs several ranks along an axis of parallelism."""
        return not axis.supported_by or bool(getattr(self, axis.supported_by))

    @property
    def tensor(self) -> bool:
        """Whether it runs tensor parallelism (parallel.tp above 1)."""
        return bool(self.tensor_modes)


class PlainLayout(StrictModel):
    """What users of the software call a plain layout: of the layouts that estimates cannot tell apart, a
    search suggests the plainest (plan/search/plain.py). The defaults are Megatron's habits."""

    zero: Annotated[list[Annotated[float, Ge(0), Le(10)]], MinLen(4), MaxLen(4)] = Field(
        [0, 0, 2, 4], description="complexity of ZeRO 0 to 3; a doubling of tp counts 0.5, full recomputation 2"
    )
    unusual: list[Literal["tp", "pp", "cp", "ep"]] = Field(
        [], description="axes that users leave at 1 where they can; more ranks count 2 in addition"
    )


class RuntimeProfile(StrictModel):
    """Assumptions about a training software: a preset of runtimes."""

    name: str = Field(description="the software")
    runs: RuntimeSupport = Field(default_factory=RuntimeSupport, description="the layouts that it runs")
    searched: RuntimeSupport | None = Field(
        None, description="what a search tries of them where settings are not asked for; all when absent"
    )
    plain: PlainLayout = Field(default_factory=PlainLayout, description="the layouts that its users call plain")
    gradient_dtype: DType | None = Field(
        None, description="data type in which gradients are reduced; that of the job when absent"
    )
    operators: OperatorCosts = Field(description="operations bound by memory bandwidth")
    overlap: OverlapShares = Field(description="shares of messages sent during computation")
    host: HostCosts = Field(description="time of the host thread")
    experts: ExpertCosts = Field(default_factory=ExpertCosts, description="layers with experts")
    adapters: AdapterCosts = Field(default_factory=AdapterCosts, description="adapters and frozen bases")
    spread: Part = Field(
        description="spread of log(measured / estimated) where the cluster was "
        "measured: 9 of 10 runs are within 1.645 times it"
    )
    spread_apart: Part = Field(description="the same for clusters that were not measured")
    shift_apart: Factor = Field(
        1.18,
        description="seconds of a step where software, device and cluster were never measured "
        "together, relative to the estimate: what typical systems show beside tuned ones",
    )
    checkpoint_writers: Literal["replica", "all"] = Field(
        "all", description="ranks that save a checkpoint under ZeRO: the first replica of each part, or all ranks"
    )
    widening: Annotated[float, Ge(1), Le(10)] = Field(
        1.26, description="factor on both for each way in which a job is outside the fitted runs"
    )
    seen: FittedRuns = Field(default_factory=FittedRuns, description="runs that the figures were fitted to")
    memory: RuntimeMemory = Field(default_factory=RuntimeMemory, description="what it holds in memory")
    with_adapters: dict[str, Any] = Field(
        default_factory=dict,
        description="figures that replace these in jobs with training.adapter, by the same tables and keys; "
        "`seen` are the runs with adapters alone",
    )
    source: str = Field(description="where the figures come from")


def get_profile(name: str, *, adapters: bool = False) -> RuntimeProfile:
    """The runtime preset that `training.runtime` names. adapters: with the figures of its table `with_adapters`.

    Raises InputError where no preset has this name, and where its file is wrong, with an issue for
    each wrong key. A file is read again when it has changed."""
    file = profile_file(name)
    stamp = None if file.is_bundled else _stamp(file.path)
    profile = _read_profile(file, stamp)
    return _read_adapters(file, stamp) if adapters and profile.with_adapters else profile


def job_profile(training: TrainingSpec) -> RuntimeProfile:
    """The profile of the software that runs a job. Raises InputError as `get_profile` does."""
    return get_profile(training.runtime, adapters=training.adapter is not None)


def is_same_software(one: str, other: str) -> bool:
    """Whether a launcher starts both runtimes, so that what a script does under one it does under the other."""
    return one == other or bool({*get_profile(one).runs.emit} & {*get_profile(other).runs.emit})


def profile_file(name: str) -> PresetFile:
    """The file of a runtime preset. Raises InputError where no preset has this name."""
    searched = search_path()
    folders = tuple([_stamp(folder / "runtimes") for folder in own_folders(searched)])
    return _profile_file(name, searched, folders)


def _stamp(path: Path) -> tuple[int, int] | None:
    """(mtime_ns, size) of a file or folder; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=256)
def _profile_file(name: str, search_path: tuple[str, ...], folders: tuple[object, ...]) -> PresetFile:
    """The file of a profile, found once for each content of the folders."""
    return get_file("runtimes", name, where="training.runtime")


@lru_cache(maxsize=256)
def _read_profile(file: PresetFile, stamp: object) -> RuntimeProfile:
    """Read once for each version of the file."""
    try:
        profile = RuntimeProfile.model_validate(file.read())
    except ValidationError as error:
        raise InputError(preset_issues(error, file, RuntimeProfile)) from None
    if profile.with_adapters:
        _read_adapters(file, stamp)  # a wrong key is found whatever the job
    return profile


@lru_cache(maxsize=256)
def _read_adapters(file: PresetFile, _: object) -> RuntimeProfile:
    """As `_read_profile`, under the figures of `with_adapters`."""
    table = file.read()
    own = table.pop("with_adapters", {})
    if "seen" in own:
        table.pop("seen", None)
    try:
        return RuntimeProfile.model_validate(_over(table, own) | {"with_adapters": own})
    except ValidationError as error:
        raise InputError(preset_issues(error, file, RuntimeProfile)) from None


def _over(table: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A table with the keys of another one over it, table by table."""
    both = {key for key, value in own.items() if isinstance(value, dict) and isinstance(table.get(key), dict)}
    return {**table, **own, **{key: _over(table[key], own[key]) for key in both}}


def is_launched(runtime: str) -> bool:
    """Whether `mpctl launch` runs jobs under the runtime of this name."""
    return get_profile(runtime).runs.launched


def launched_runtime(runtime: str) -> str:
    """The runtime under which `mpctl launch` runs a job: its own if that is launched, else the
    default one."""
    return runtime if is_launched(runtime) else DEFAULT_RUNTIME
