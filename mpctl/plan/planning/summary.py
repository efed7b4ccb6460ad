"""The summary of a plan: verdict, training settings, main figures and links, the same in every
output.

Text, JSON and page take them from here, so that they cannot disagree. There are two figures of
memory: `allocated` counts the job's tensors at the peak, `on device` is the figure of the device's
tools (with the allocator's reserve and the libraries' context); only the second decides whether a
job fits. And two of speed: model FLOP are those of the model, hardware FLOP include recomputation
(arXiv 2205.05198, section 6.1); both count attention in full.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, get_args

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.axes import expert_order
from mpctl.core.records import Json
from mpctl.core.topology import Topology
from mpctl.core.units import ADAPTER_CONVENTION, MFU_CONVENTION, bytes_text, count_text, plural, rate_text, seconds_text
from mpctl.model.layout.link_levels import LinkLevel, find_holder, shown_levels, topology_levels
from mpctl.plan.planning.layout_settings import layout_of, tensor_mode_text
from mpctl.plan.planning.plan import Plan
from mpctl.spec.cluster import Link, LinkSpec, link_hint
from mpctl.spec.job import JobSpec
from mpctl.spec.layout_text import shortest

if TYPE_CHECKING:
    from mpctl.plan.estimate.job import AtLoad, Estimate
    from mpctl.plan.estimate.step import StepTime


class TrainingEntry(TypedDict):
    """How the model is trained; fields that a search varies are None.

    dtype_is_auto: whether the data type follows from the device. seq_length: tokens of a sample, of
    an encoder-decoder the encoder's; None without a model. micro_batches: micro batches of a step on
    each pipeline. runtime_is_default: whether the job names no runtime. moe_load: of a model with
    experts the load of their fullest rank, over the mean, that memory has to hold at most.
    """

    dtype: str
    dtype_is_auto: bool
    seq_length: int | None
    decoder_seq_length: NotRequired[int]
    global_batch_size: int | None
    micro_batch_size: int | None
    micro_batches: int | None
    recompute: str | None
    zero: int | None
    zero_size: NotRequired[int]
    runtime: str
    runtime_is_default: bool
    moe_load: NotRequired[float]


def training_settings(job: JobSpec, searched: Collection[str] | None = None) -> TrainingEntry:
    """The settings of training that every output states; zero_size where it is given.

    searched: the settings that a search varies, by the names of the entry; they are None, as is the
    number of micro batches, which follows from them.
    """
    t, free = job.training, searched or ()
    entry: TrainingEntry = {
        "dtype": t.dtype,
        "dtype_is_auto": t.is_dtype_auto,
        "seq_length": job.model.seq_length if job.model else None,
        "global_batch_size": t.global_batch_size,
        "micro_batch_size": None if "micro_batch_size" in free else t.micro_batch_size,
        "micro_batches": job.num_microbatches if searched is None else None,
        "recompute": None if "recompute" in free else t.recompute,
        "zero": None if "zero" in free else job.parallel.zero,
        "runtime": t.runtime,
        "runtime_is_default": t.is_runtime_default,
    }
    if entry["zero"] and job.parallel.zero_size is not None:
        entry["zero_size"] = job.parallel.zero_size
    if job.model is not None and job.model.experts:
        from mpctl.plan.estimate.routing import HELD_LOAD  # a dense model never pays for it

        entry["moe_load"] = t.moe_load or HELD_LOAD
    if job.model is not None and job.model.decoder_seq_length:
        entry["decoder_seq_length"] = job.model.decoder_seq_length
    return entry


def training_line(settings: TrainingEntry) -> str:
    """`dtype bf16 (auto), sequence 8,192, global batch 64, micro batch 4 x 8, recompute none, ZeRO 0,
    runtime mpctl`: 8 micro batches of 4 samples a step on each replica; `recompute any` where a search
    varies it."""
    count, dtype, tokens = settings["micro_batches"], settings["dtype"], settings["seq_length"]
    lengths = [tokens or 0, *([settings["decoder_seq_length"]] if "decoder_seq_length" in settings else [])]
    return ", ".join(
        [
            f"dtype {dtype}" + " (auto)" * settings["dtype_is_auto"],
            *([f"sequence {' + '.join(f'{n:,}' for n in lengths)}"] if tokens else []),
            f"global batch {settings['global_batch_size']:,}",
            f"micro batch {_given(settings['micro_batch_size'])}" + (f" x {count:,}" if count else ""),
            f"recompute {_given(settings['recompute'])}",
            f"ZeRO {_given(settings['zero'])}"
            + (f" over {plural(settings['zero_size'], 'rank')}" if "zero_size" in settings else ""),
            *([f"expert load {settings['moe_load']:g}"] if "moe_load" in settings else []),
            f"runtime {settings['runtime']}",
        ]
    )


def _given(value: int | str | None) -> str:
    return "any" if value is None else f"{value}"


class PlanSummary(NamedTuple):
    """Main figures of a plan, bytes and FLOP/s of one rank; None if unknown.

    fits: whether the fullest rank's device_bytes leave headroom_percent of device_memory_bytes
    free. fullest_stage: the stage of that rank. step_seconds_low, step_seconds_high: 9 of 10
    measured steps are between them.
    """

    fits: bool | None = None
    fullest_stage: int | None = None
    allocated_bytes: int | None = None
    device_bytes: int | None = None
    device_memory_bytes: int | None = None
    headroom_percent: float | None = None
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    tokens_per_second: float | None = None
    model_flops_per_second: float | None = None
    hardware_flops_per_second: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    mfu_causal: float | None = None
    mfu_convention: str | None = None


def plan_summary(plan: Plan) -> PlanSummary:
    """The main figures; without a model none is known."""
    if plan.estimate is None:
        return PlanSummary()
    fullest, device = plan.estimate.fullest_stage, plan.job.cluster.device
    return PlanSummary(
        fits=plan.fits,
        fullest_stage=fullest.stage,
        allocated_bytes=fullest.allocated_bytes,
        device_bytes=fullest.device_bytes,
        device_memory_bytes=device.memory_bytes if device else None,
        headroom_percent=plan.job.cluster.headroom,
        **_speeds(plan.estimate),
    )


def _speeds(estimate: Estimate) -> dict[str, Any]:
    time = estimate.time
    if isinstance(time, str):
        return {}
    return {
        "step_seconds": time.total,
        "step_seconds_low": time.low,
        "step_seconds_high": time.high,
        "tokens_per_second": estimate.tokens_per_second or 0.0,
        "mfu": time.mfu,
        "hfu": time.hfu,
        "mfu_causal": estimate.causal_mfu,
        "mfu_convention": ADAPTER_CONVENTION if estimate.layout.table.adapter is not None else MFU_CONVENTION,
        "model_flops_per_second": time.model_flops / time.total,
        "hardware_flops_per_second": time.hardware_flops / time.total,
    }


def model_name(job: JobSpec) -> str | None:
    """The model's name, else its family; None without a model."""
    return (job.model.name or job.model.family) if job.model else None


def sizes_text(job: JobSpec) -> str:
    """`tp 4 (2d) x dp 2 x pp 4`: the axes of more than one rank, or `one rank`; behind them those
    of the experts where they differ, `tp 2 x dp 8, experts ep 4 x edp 4`."""
    p, dense = job.parallel, dense_sizes_text(job)
    return f"{dense}, experts {expert_axes_text(job)}" if p.ep > 1 or p.etp > 1 else dense


def dense_sizes_text(job: JobSpec) -> str:
    """The same without those of experts."""
    mode = tensor_mode_text(layout_of(job))
    used = (f"{axis} {size}" + mode * (axis == "tp") for axis, size in job.sizes.items() if size > 1)
    return " x ".join(used) or "one rank"


def expert_axes_text(job: JobSpec) -> str:
    """`ep 4 x edp 4`: the axes of more than one rank along which experts are placed; pp is that of
    all layers."""
    sizes = {axis: size for axis, size in job.expert_sizes.items() if axis != "pp" and size > 1}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "one rank"


def experts_text(job: JobSpec) -> str:
    """How the ranks are numbered for experts, and where these are: `etp 1 x ep 4 x edp 4, order
    etp-ep-edp-pp; expert j of 64 at ep j // 16`; empty for a job without experts."""
    if not job.has_experts:
        return ""
    p, sizes = job.parallel, job.expert_sizes
    placed = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "pp")
    parts = [f"{placed}, order {'-'.join(expert_order(p.order))}"]
    if p.ep > 1 and p.tp > 1 and "etp" not in p.model_fields_set:
        parts[0] += " (etp is 1 unless it is given, whatever tp is)"
    if job.model is not None and job.model.experts:
        count = job.model.experts
        parts.append(
            f"expert j of {count} at ep j // {count // p.ep}" if p.ep > 1 else f"every rank of edp holds all {count}"
        )
    return "; ".join(parts)


def model_text(estimate: Estimate) -> str:
    """`355M parameters, 24 layers, hidden 1024, 16 heads, sequence 1024`; of a mixture of experts
    `46.7B parameters, 12.9B active, 32 layers, 8 experts, 2 a token, hidden 4096, ..`."""
    model = estimate.layout.model
    layers = f"{model.layers} + {model.decoder_layers}" if model.decoder_layers else model.layers
    lengths = f" + {model.decoder_seq_length}" if model.decoder_seq_length else ""
    active = experts = ""
    if model.experts is not None:
        active = f"{count_text(estimate.active_parameters)} active, "
        experts = f"{plural(model.experts, 'expert')}, {model.experts_per_token} a token, "
    return (
        f"{count_text(estimate.parameters)} parameters, {active}{layers} layers, {experts}"
        f"hidden {model.hidden}, {model.heads} heads, sequence {model.seq_length}{lengths}"
    )


def verdict(plan: Plan) -> str:
    """Whether the plan fits its devices, and the bytes that are left or lacking, in one line."""
    if plan.estimate is None:
        return "legal; memory and time are not estimated: no model is named (--model NAME)"
    return plan.estimate.verdict


def headline_figures(plan: Plan) -> Iterator[tuple[str, str]]:
    """The main figures as name and short text, for tiles; none without a model."""
    estimate, summary = plan.estimate, plan_summary(plan)
    if estimate is None:
        return
    if summary.step_seconds is not None:
        yield "step time", seconds_text(summary.step_seconds)
        yield "tokens/s", count_text(summary.tokens_per_second or 0)
        yield "MFU", f"{summary.mfu or 0:.0%}"
    yield "on device", bytes_text(summary.device_bytes or 0)
    yield "parameters", count_text(estimate.parameters)
    if estimate.layout.model.experts is not None:
        yield "active parameters", count_text(estimate.active_parameters)


def main_figures(plan: Plan) -> Iterator[tuple[str, str]]:
    """Step time, speed, routing and checkpoint as name and text; none without a model. Memory is in the
    verdict and in a table of its own."""
    estimate = plan.estimate
    if estimate is None:
        return
    if estimate.layout.table.adapter is not None:
        from mpctl.plan.planning.adapters import adapter_entry, adapter_text  # a plan without adapters needs neither

        if (entry := adapter_entry(estimate.layout)) is not None:
            yield "adapter", adapter_text(entry)
    yield from _time_figures(plan, estimate.time)
    if text := chat_text(estimate):
        yield "chat rows", text
    if text := routing_text(estimate):
        yield "routing", text
    if estimate.layout.profile.runs.launched:
        yield "checkpoint", f"{bytes_text(estimate.checkpoint_bytes)} on the disk"
    if isinstance(estimate.time, str):
        return
    from mpctl.plan.planning.whole_run import saving_advice  # which takes a plan

    if advice := saving_advice(plan):
        yield "saving", advice


def chat_text(estimate: Estimate) -> str:
    """Rows of conversations: how far they are filled and counted, with the tokens/s that remain, and which pairs
    attention computes; empty for text."""
    job, row = estimate.layout.job, estimate.layout.model.seq_length
    chat, rate = job.data.chat, estimate.tokens_per_second
    if chat is None:
        return ""
    parts, counts = [], {"no padding": chat.real_tokens(row), "counted by the loss": chat.row_counted}
    for name, tokens in counts.items():
        if tokens is not None:
            speed = "" if rate is None else f", {count_text(rate * tokens / row)} tokens/s"
            parts.append(f"{tokens / row:.0%} are {name}{speed}")
    parts = parts or ["taken as full (data.chat.row_tokens sets it)"]
    packed = job.packed_attention
    if packed is not None and packed.segment:
        parts.append(f"attention within conversations of {packed.segment:,.0f} tokens")
    elif packed is not None:
        unknown = "" if packed.has_mask else " (data.chat.mean_length sets it)"
        parts.append(f"attention of the full row{', under a mask' if packed.has_mask else unknown}")
    return "; ".join(parts)


def routing_text(estimate: Estimate) -> str:
    """`balanced 72.3 GiB and 7.41 s; at 1.2 times the mean on the fullest rank 78.2 GiB and 8.04 s (must
    fit; training.moe_load sets it)`; empty where every rank has all experts."""
    found, stated = estimate.at_loads(), estimate.layout.job.training.moe_load
    if not found or (found["loaded"].load == 1 and stated is None):
        return ""

    def figures(one: AtLoad) -> str:
        seconds = "" if one.step_seconds is None else f" and {seconds_text(one.step_seconds)}"
        return f"{bytes_text(one.device_bytes)}{seconds}"

    balanced, loaded = found["balanced"], found["loaded"]
    fullest = f"at {loaded.load:.3g} times the mean on the fullest rank"
    if loaded == balanced:
        return f"planned {fullest} (training.moe_load)"
    return f"balanced {figures(balanced)}; {fullest} {figures(loaded)} (must fit; training.moe_load sets it)"


def _time_figures(plan: Plan, time: StepTime | str) -> Iterator[tuple[str, str]]:
    if isinstance(time, str):
        missing = (link for link in get_args(Link) if f"cluster.{link} has no " in time)
        ways = [f" → {link_hint(plan.job.cluster, link)}" for link in missing]
        yield "step time", f"not estimated: {time}{''.join(ways)}"
        return
    summary = plan_summary(plan)
    yield "step time", step_text(time)
    yield "tokens/s", count_text(summary.tokens_per_second or 0)
    yield from rate_figures(summary)


def step_text(time: StepTime) -> str:
    """`24.42 s (9 of 10 runs: 20.61 s to 28.95 s)`."""
    band = f"{seconds_text(time.low)} to {seconds_text(time.high)}"
    return f"{seconds_text(time.total)} (9 of 10 runs: {band})"


def rate_figures(summary: PlanSummary) -> Iterator[tuple[str, str]]:
    """Model and hardware FLOP/s of a rank as name and text: `MFU`, `52 %, 518.4 TFLOP/s a rank; attention
    counted in full, causal 49 %`."""
    yield "MFU", f"{_rate(summary.mfu, summary.model_flops_per_second)}; {mfu_note(summary)}"
    yield "HFU", f"{_rate(summary.hfu, summary.hardware_flops_per_second)}, with recomputation"


def _rate(share: float | None, flops: float | None) -> str:
    return f"{share or 0:.0%}, {rate_text(flops or 0)} a rank"


def mfu_note(summary: PlanSummary) -> str:
    """Which attention the MFU counts: `attention counted in full, causal 49%`; the convention alone where no
    attention is causal."""
    causal = summary.mfu_causal or 0.0
    differs = summary.mfu is not None and causal < 0.999 * summary.mfu
    return f"{summary.mfu_convention}" + (f", causal {causal:.0%}" if differs else "")


def placement_text(plan: Plan) -> str:
    """`1,024 ranks on 128 nodes x 8 GPUs of NVIDIA A100-SXM4-80GB`."""
    cluster = plan.job.cluster
    device, nodes = cluster.device, plural(cluster.nodes, "node")
    ranks = plural(plan.job.world_size, "rank")
    if device is not None and device.is_cpu:
        return f"{ranks} on {nodes}, each on {device.name}"
    name = f" of {device.name}" if device else ""
    return f"{ranks} on {nodes} x {plural(cluster.gpus_per_node or 1, 'GPU')}{name}"


def order_text(plan: Plan) -> str:
    """How ranks and layers are ordered: `order tp-cp-dp-pp, 1f1b, vpp 3, sequence parallel`."""
    p = plan.job.parallel
    return ", ".join(
        [
            f"order {p.order}",
            *([p.schedule] if p.pp > 1 else []),
            *([f"vpp {p.vpp}"] if p.vpp > 1 else []),
            *(["stages balanced by cost"] if p.stage_balance == "cost" else []),
            *([f"layout {shortest(p.pipeline_layout)}"] if p.pipeline_layout else []),
            *(["sequence parallel"] if p.sequence_parallel else []),
        ]
    )


def links_text(plan: Plan, topology: Topology) -> str:
    """`NVLink domains of 64 ranks (16 nodes), NVLink5 900 GB/s a GPU; between them InfiniBand 200
    GB/s a node; 2 pods of 512 ranks, 1:4 oversubscribed`."""
    cluster, shown = plan.job.cluster, shown_levels(plan.job.cluster, topology)
    if not shown:
        return ""
    domain, *fabric = topology_levels(cluster, topology)
    nodes = domain.ranks // topology.gpus_per_node
    size = f" ({plural(nodes, 'node')})" if nodes > 1 else ""
    parts = [f"{_count(topology, domain)} of {domain.ranks:,} ranks{size}"]
    parts[0] += _link_text(cluster.intra_node, "a GPU")
    if domain.ranks < topology.world_size and cluster.inter_node is not None:
        parts.append(f"between them{_link_text(cluster.inter_node, 'a node').removeprefix(',')}")
    parts += [f"{_count(topology, level)} of {level.ranks:,} ranks{over_text(level)}" for level in fabric]
    return "; ".join(parts)


def over_text(level: LinkLevel) -> str:
    """`, 1:4 oversubscribed`, or nothing where all of the cards' bandwidth leaves the level."""
    over = level.oversubscription
    return f", 1:{over:g} oversubscribed" if over > 1 else ""


def find_holder_name(plan: Plan, topology: Topology, kind: str) -> str | None:
    """The innermost level that holds every group of a kind: `node`, `NVLink domain`, `pod`; None
    where the groups leave all of them."""
    holder = find_holder(plan.job.cluster, topology, kind)
    return None if holder is None else holder.name


def link_entries(plan: Plan, topology: Topology) -> list[Json]:
    """The levels of links, the node first: ranks under each network, the number of networks, and
    the bandwidth that leaves one."""
    node = LinkLevel("node", topology.gpus_per_node)
    return [
        {
            "name": level.name,
            "ranks": level.ranks,
            "networks": -(-topology.world_size // level.ranks),
            "oversubscription": level.oversubscription,
            "latency_seconds": level.latency,
        }
        for level in (node, *shown_levels(plan.job.cluster, topology))
    ]


def _count(topology: Topology, level: LinkLevel) -> str:
    return plural(-(-topology.world_size // level.ranks), level.name)


def _link_text(link: LinkSpec | None, of: str) -> str:
    if link is None:
        return ""
    name = f" {link.name}" if link.name else ""
    return f",{name} {link.bandwidth / 1e9:,.4g} GB/s {of}"
