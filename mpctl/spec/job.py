"""One job: everything that a plan is computed from and the only thing that a worker reads.

`complete` fills in what follows from the rest (dp, ranks a node, global batch), so that nothing is
left open in a resolved job. Whether the job is legal is decided by plan/rules/validate.py alone.
"""

from collections.abc import Mapping
from math import prod
from typing import Annotated

from annotated_types import MinLen
from pydantic import Field, ValidationError

from mpctl.core.axes import AXIS_NAMES, FILLING
from mpctl.core.units import plural
from mpctl.spec.base import Bytes, CountOrZero, DType, Probability, StrictModel
from mpctl.spec.chat import ChatSpec, PackedAttention
from mpctl.spec.cluster import ClusterSpec, DeviceSpec
from mpctl.spec.launch import LAUNCHED_AS, LaunchedKind, LaunchSpec
from mpctl.spec.model import ModelSpec, without_derived
from mpctl.spec.parallel import ParallelSpec
from mpctl.spec.runtime import is_launched
from mpctl.spec.training import TrainingSpec


class DataSpec(StrictModel):
    """The text to train and validate on. Paths in a job file are relative to the file."""

    corpus: Annotated[list[str], MinLen(1)] | None = Field(
        None, description="text to train on: files, folders or python-stdlib; prepared into the run directory"
    )
    path: str | None = Field(None, description="a folder written by `mpctl data prepare`")
    tokenizer: str | None = Field(None, description="tokenizer.json for the corpus; a new one is trained when absent")
    validation: dict[str, str] = Field(
        default_factory=dict, description="more folders of prepared data to validate on, each under a chosen name"
    )
    validation_fraction: Probability = Field(
        0.02, description="share of the corpus' documents held back for validation"
    )
    max_bytes: Bytes | None = Field(
        None, description="use at most this much text of the corpus, bytes; all when absent"
    )
    text_key: Annotated[str, MinLen(1)] = Field(
        "text", description="key of the text in .jsonl lines and .parquet rows of the corpus"
    )
    encoding: str = Field(
        "utf-8", description="encoding of the corpus' text and .jsonl files, such as latin-1 or utf-16"
    )
    chat: ChatSpec | None = Field(
        None, description="the corpus holds conversations, .jsonl lines of messages; text when absent"
    )


class CheckpointSpec(StrictModel):
    """When checkpoints are saved, and how many of them stay in the run directory."""

    interval: CountOrZero = Field(0, description="steps between checkpoints; 0 saves only at the end and on a stop")
    at_end: bool = Field(True, description="save a checkpoint after the last step")
    keep_last: CountOrZero = Field(
        0, description="number of newest checkpoints to keep: older ones are removed; 0 keeps all"
    )
    keep_every: CountOrZero = Field(
        0, description="in addition to keep_last, keep each checkpoint whose step is a multiple of this; 0: no others"
    )
    asynchronous: bool = Field(
        True,
        description="training waits only for a copy to host memory, which a thread writes to "
        "disk; false: training waits until the checkpoint is on disk",
    )


class JobSpec(StrictModel):
    """A complete job: the tables of a job file.

    A plan follows from it alone, a worker reads nothing else, and a run directory keeps it as
    job.json. `complete` fills in what follows from the rest.
    """

    name: str | None = Field(None, description="the job's name; names its run directory")
    description: str | None = Field(None, description="what the job is, in a sentence")
    source: str | None = Field(None, description="where the job's settings come from")
    cluster: ClusterSpec = Field(default_factory=ClusterSpec, description="the machines")
    model: ModelSpec | None = Field(None, description="the shape of the model")
    parallel: ParallelSpec = Field(default_factory=ParallelSpec, description="the parallel layout")
    training: TrainingSpec = Field(default_factory=TrainingSpec, description="how the model is trained")
    checkpoint: CheckpointSpec = Field(
        default_factory=CheckpointSpec, description="when checkpoints are saved, how many stay"
    )
    data: DataSpec = Field(default_factory=DataSpec, description="what it is trained on")
    launch: LaunchSpec = Field(default_factory=LaunchSpec, description="how ranks are run")

    @property
    def world_size(self) -> int:
        """Ranks of the job: nodes times ranks a node."""
        return self.cluster.nodes * (self.cluster.gpus_per_node or 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along every axis; where dp is open, as many replicas as the world holds."""
        p = self.parallel
        sizes: dict[str, int] = {axis: getattr(p, axis) or 1 for axis in AXIS_NAMES}
        if not getattr(p, FILLING):
            sizes[FILLING] = max(1, self.world_size // prod(sizes.values()))
        return sizes

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Ranks along the axes of the experts' view; edp fills what etp, ep and pp leave of the
        world, where they divide it.

        By hand, 16 ranks, tp 2, pp 2, ep 4: etp 1, ep 4, edp 2, pp 2.
        """
        p = self.parallel
        edp = max(1, self.world_size // (p.etp * p.ep * p.pp))
        return {"etp": p.etp, "ep": p.ep, "edp": edp, "pp": p.pp}

    @property
    def has_experts(self) -> bool:
        """Whether the ranks are numbered a second time, for experts: the model has some, or ep or
        etp is set."""
        has_some = self.model is not None and self.model.experts is not None
        return has_some or self.parallel.ep > 1 or self.parallel.etp > 1

    @property
    def packed_attention(self) -> PackedAttention | None:
        """How attention keeps apart the conversations of a row; None where rows are not packed. mpctl's own kernels
        have a mask, those of others skip other conversations' keys."""
        chat = self.data.chat
        if chat is None or not chat.is_packed:
            return None
        is_own = is_launched(self.training.runtime)
        return PackedAttention(is_own, 0.0 if is_own else chat.mean_length or 0.0)

    @property
    def label(self) -> str:
        """Name, or model, and the axes of more than one rank: `gpt2: tp 2 x dp 4, 8 ranks`."""
        name = self.name or (self.model and self.model.name) or "a job"
        used = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)
        return f"{name}: {used + ', ' if used else ''}{plural(self.world_size, 'rank')}"

    @property
    def device_kind(self) -> str | None:
        """Kind of device that ranks run on: launch.device, or for `auto` the kind of the cluster's
        device; None if neither is given."""
        if self.launch.device != "auto":
            return self.launch.device
        return None if self.cluster.device is None else self.cluster.device.kind

    @property
    def launched_kind(self) -> LaunchedKind | None:
        """The same by torch's names, cuda for AMD's GPUs too; None where it is not determined, or
        is a kind that mpctl plans but does not launch."""
        return LAUNCHED_AS.get(self.device_kind or "")

    @property
    def num_microbatches(self) -> int:
        """Micro batches that each replica runs in one step (gradient accumulation)."""
        t, per_pass = self.training, self.training.micro_batch_size * self.sizes["dp"]
        return max(1, (t.global_batch_size or per_pass) // per_pass)


def complete(job: JobSpec) -> JobSpec:
    """The job with dp, ranks a node, global batch and data type filled in where they were left
    open."""
    p, cluster, training = job.parallel, job.cluster, job.training
    if cluster.gpus_per_node is None:
        needed = prod(getattr(p, axis) or 1 for axis in AXIS_NAMES)
        cluster = cluster.model_copy(update={"gpus_per_node": -(-needed // cluster.nodes)})
    job = job.model_copy(update={"cluster": cluster})
    parallel = p.model_copy(update={FILLING: job.sizes[FILLING], **_ends_as_layers(job)})
    if training.global_batch_size is None:
        batch = training.micro_batch_size * job.sizes["dp"]
        training = training.model_copy(update={"global_batch_size": batch})
    if training.dtype == "auto":
        training = training.with_auto_dtype(auto_dtype(cluster.device))
    return job.model_copy(update={"parallel": parallel, "training": training})


# Settings that `complete` derives from the others where they are left open.
OPEN_SETTINGS = (
    "parallel.dp",
    "parallel.embedding_is_layer",
    "parallel.loss_is_layer",
    "cluster.gpus_per_node",
    "training.global_batch_size",
    "training.dtype",
)
OPEN = (None, False, "auto")
HALVES: tuple[DType, ...] = ("bf16", "fp16")


def open_settings_of(job: JobSpec) -> frozenset[str]:
    """The settings that a job leaves open and `complete` fills in, by their full names."""
    tables = {name: getattr(job, name).model_dump() for name in ("parallel", "cluster", "training")}
    keys = (name.split(".") for name in OPEN_SETTINGS)
    return frozenset(f"{table}.{key}" for table, key in keys if tables[table][key] in OPEN)


def changed_job(job: JobSpec, settings: Mapping[str, object], open_settings: frozenset[str]) -> JobSpec | None:
    """A complete job with some settings changed; None where the schema refuses a value.

    open_settings: those that were left open before `complete`; they are derived again, as are the
    model's keys that follow from others.
    """
    raw = job.model_dump()
    if raw["model"]:
        raw["model"] = without_derived(raw["model"])
    for name in open_settings - settings.keys():
        table, key = name.split(".")
        raw[table].pop(key)
    for name, value in settings.items():
        table, key = name.split(".")
        raw[table][key] = value
    try:
        return complete(JobSpec.model_validate(raw))
    except ValidationError:
        return None


def auto_dtype(device: DeviceSpec | None) -> DType:
    """Return the data type of training.dtype `auto`: bf16 on an accelerator that has it, fp16 on an
    older one; fp32 on a CPU, where jobs are tried out and losses compared, and if no device is named.

    By hand: bf16 on an H100, fp16 on a V100, fp32 on a laptop.
    """
    if device is None or device.is_cpu:
        return "fp32"
    return next((half for half in HALVES if half in device.peak_flops), "fp32")


def _ends_as_layers(job: JobSpec) -> dict[str, bool | str]:
    """The settings that count embedding and loss as a layer each, if the job leaves them open and
    its runtime cuts layers that way; otherwise empty. A model with experts whose layers divide
    neither way has a layout of its own there, taken to be stages of equal cost (DeepSeek-V3's 61
    layers on 16 stages)."""
    p = job.parallel
    given = p.first_stage_layers or p.last_stage_layers or p.embedding_is_layer or p.loss_is_layer
    if job.model is None or given or p.stage_balance != "even" or p.pipeline_layout:
        return {}
    layers, blocks = job.model.all_layers, p.pp * p.vpp
    if ends_count_as_layers(layers, blocks, job.training.runtime):
        return {"embedding_is_layer": True, "loss_is_layer": True}
    if job.model.experts and blocks <= layers and layers % blocks:
        from mpctl.spec.runtime import get_profile

        if get_profile(job.training.runtime).runs.ends_as_layers:
            return {"stage_balance": "cost"}
    return {}


def ends_count_as_layers(layers: int, blocks: int, runtime: str) -> bool:
    """Whether a runtime counts embedding and loss as a layer each when it cuts `layers` into equal
    blocks (stages times chunks). Megatron does where layers alone do not divide but layers plus 2
    do: 22 layers on 8 stages are cut as 24. Under mpctl's own runtime a job asks for it."""
    if layers % blocks == 0 or (layers + 2) % blocks:
        return False
    from mpctl.spec.runtime import get_profile  # few jobs get here, and it takes time to import

    return get_profile(runtime).runs.ends_as_layers
