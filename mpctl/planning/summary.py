"""A plan in short: its verdict, its settings and its main figures, the same in every output.

Text, JSON and page take them from here, so that they cannot disagree. There are two figures of
memory: `allocated` is what the job's tensors take at the peak, `on the device` what the device's
own tools show (with the allocator's reserve and the libraries' context); only the second decides
whether a job fits. And two of speed: model FLOP are those of the model, hardware FLOP include
recomputation (arXiv 2205.05198, section 6.1).

By hand: 64 samples of 1,024 tokens in 0.25 s are 262,144 tokens/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, get_args

from mpctl.planning.layout_settings import layout_of, tensor_mode_text
from mpctl.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.linked_clusters import Link, link_hint
from mpctl.units import bytes_text, count_text, plural, rate_text, seconds_text

if TYPE_CHECKING:
    from mpctl.estimate.job import Estimate
    from mpctl.estimate.step import StepTime
    from mpctl.planning.schemas import SummaryEntry


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Main figures of a plan, bytes and FLOP/s of one rank; None for what is not known.

    fits: whether the fullest rank's device_bytes leave headroom_percent of device_memory_bytes
    free. fullest_stage: the stage of that rank. step_seconds_low, step_seconds_high: 9 of 10
    measured steps lie between.
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

    def as_dict(self) -> SummaryEntry:
        """The summary as an entry of mpctl.plan/1."""
        return asdict(self)


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


def _speeds(estimate: Estimate) -> dict[str, float]:
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
        "model_flops_per_second": time.model_flops / time.total,
        "hardware_flops_per_second": time.hardware_flops / time.total,
    }


def model_name(job: JobSpec) -> str | None:
    """The model's name, else its family; None without a model."""
    return (job.model.name or job.model.family) if job.model else None


def sizes_text(job: JobSpec) -> str:
    """`tp 4 (2d) x dp 2 x pp 4`: the axes of more than one rank, or `one rank`."""
    mode = tensor_mode_text(layout_of(job))
    used = (
        f"{axis} {size}" + mode * (axis == "tp") for axis, size in job.sizes.items() if size > 1
    )
    return " x ".join(used) or "one rank"


def model_text(estimate: Estimate) -> str:
    """`355M parameters, 24 layers, hidden 1024, 16 heads, sequence 1024`."""
    model = estimate.layout.model
    layers = f"{model.layers} + {model.decoder_layers}" if model.decoder_layers else model.layers
    lengths = f" + {model.decoder_seq_length}" if model.decoder_seq_length else ""
    return (
        f"{count_text(estimate.parameters)} parameters, {layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads, sequence {model.seq_length}{lengths}"
    )


def verdict(plan: Plan) -> str:
    """Whether the plan fits its devices, in one line, and what is left or lacking."""
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
    yield "memory on the device", bytes_text(summary.device_bytes or 0)
    yield "allocated by tensors", bytes_text(summary.allocated_bytes or 0)
    yield "parameters", count_text(estimate.parameters)


def main_figures(plan: Plan) -> Iterator[tuple[str, str]]:
    """Step time, speed, memory and checkpoint as name and text; none without a model."""
    estimate, device = plan.estimate, plan.job.cluster.device
    if estimate is None:
        return
    yield from _time_figures(plan, estimate.time)
    fullest = estimate.fullest_stage
    have = f", which has {bytes_text(device.memory_bytes)}" if device else ""
    tensors = bytes_text(fullest.allocated_bytes)
    need = f"{bytes_text(fullest.device_bytes)} on the device{have}"
    yield "memory", f"{need}; {tensors} allocated by tensors"
    if plan.job.training.runtime == "mpctl":
        yield "checkpoint", f"{bytes_text(estimate.checkpoint_bytes)} on the disk"


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
    """Model and hardware FLOP/s of a rank as name and text: `MFU`, `45%: 140.4 TFLOP/s of ...`."""
    for name, word, rate, share in (
        ("MFU", "model", summary.model_flops_per_second, summary.mfu),
        ("HFU", "hardware", summary.hardware_flops_per_second, summary.hfu),
    ):
        yield name, f"{share or 0:.0%}: {rate_text(rate or 0)} of {word} FLOP a rank"


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
    return ", ".join([
        f"order {p.order}", *([p.schedule] if p.pp > 1 else []),
        *([f"vpp {p.vpp}"] if p.vpp > 1 else []),
        *(["stages balanced by cost"] if p.stage_balance == "cost" else []),
        *(["sequence parallel"] if p.sequence_parallel else []),
    ])  # fmt: skip
