"""What a plan comes to: its verdict, its settings and its main figures, the same in every output.

Text, JSON and page take them from here, so that they cannot disagree. Two figures of memory and two
of speed are told apart by name: `allocated` is what the job's tensors ask for at the peak, `on the
device` what the device's own tools show (with the allocator's reserve and the libraries' context);
only the second decides whether a job fits. Model FLOP are those of the model, hardware FLOP also
those of recomputation (arXiv 2205.05198, section 6.1).

By hand: 64 samples of 1,024 tokens in 0.25 s are 262,144 tokens/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mpctl.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.units import bytes_text, count_text, plural, rate_text, seconds_text


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Main figures of a plan, bytes and FLOP/s of one rank; None where nothing is known.

    fits: whether device_bytes, on the fullest rank, are there; fullest_stage: that rank's stage.
    """

    fits: bool | None = None
    fullest_stage: int | None = None
    allocated_bytes: int | None = None
    device_bytes: int | None = None
    device_memory_bytes: int | None = None
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    tokens_per_second: float | None = None
    model_flops_per_second: float | None = None
    hardware_flops_per_second: float | None = None
    mfu: float | None = None
    hfu: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_summary(plan: Plan) -> PlanSummary:
    """The main figures; without a model none is known."""
    if plan.estimate is None:
        return PlanSummary()
    fullest = max(plan.estimate.memory, key=lambda stage: stage.device_bytes)
    device = plan.job.cluster.device
    return PlanSummary(
        fits=plan.fits, fullest_stage=fullest.stage, allocated_bytes=fullest.allocated_bytes,
        device_bytes=fullest.device_bytes,
        device_memory_bytes=device.memory_bytes if device else None, **_speeds(plan),
    )  # fmt: skip


def _speeds(plan: Plan) -> dict[str, float]:
    assert plan.estimate is not None
    time = plan.estimate.time
    if isinstance(time, str):
        return {}
    tokens = plan.estimate.layout.tokens_per_step
    return {
        "step_seconds": time.total, "step_seconds_low": time.low, "step_seconds_high": time.high,
        "tokens_per_second": tokens / time.total, "mfu": time.mfu, "hfu": time.hfu,
        "model_flops_per_second": time.model_flops / time.total,
        "hardware_flops_per_second": time.hardware_flops / time.total,
    }  # fmt: skip


def model_text(plan: Plan) -> str:
    """`355M parameters, 24 layers, hidden 1024, 16 heads, sequence 1024`; needs a model."""
    model, estimate = plan.job.model, plan.estimate
    assert model is not None
    layers = f"{model.layers} + {model.decoder_layers}" if model.decoder_layers else model.layers
    lengths = f" + {model.decoder_seq_length}" if model.decoder_seq_length else ""
    size = f"{count_text(estimate.parameters)} parameters, " if estimate else ""
    return (f"{size}{layers} layers, hidden {model.hidden}, {model.heads} heads, "
            f"sequence {model.seq_length}{lengths}")  # fmt: skip


def training_settings(job: JobSpec) -> dict[str, Any]:
    """What every output says of how the model is trained."""
    t = job.training
    return {
        "dtype": t.dtype, "global_batch_size": t.global_batch_size,
        "micro_batch_size": t.micro_batch_size, "micro_batches": job.num_microbatches,
        "recompute": t.recompute, "zero": job.parallel.zero, "runtime": t.runtime,
    }  # fmt: skip


def training_text(job: JobSpec) -> str:
    """`bf16, global batch 64, micro batch 4 (8 a step), recompute none, ZeRO 0, runtime mpctl`."""
    s = training_settings(job)
    return (
        f"{s['dtype']}, global batch {s['global_batch_size']}, micro batch {s['micro_batch_size']} "
        f"({s['micro_batches']:,} a step), recompute {s['recompute']}, ZeRO {s['zero']}, "
        f"runtime {s['runtime']}"
    )


def verdict(plan: Plan) -> str:
    """Whether the plan fits its devices, in one line: `fits: a rank needs ...`."""
    found = plan_summary(plan)
    if plan.estimate is None:
        return "legal; memory and time are not estimated: no model is named (--model NAME)"
    need = bytes_text(found.device_bytes or 0)
    who = "a rank" if plan.job.parallel.pp == 1 else f"stage {found.fullest_stage}"
    if found.fits is None:
        return (f"legal; not known whether it fits: {who} needs {need}, and no device is named "
                "(--cluster NAME)")  # fmt: skip
    return (f"{'fits' if found.fits else 'does not fit'}: {who} needs {need}, the device has "
            f"{bytes_text(found.device_memory_bytes or 0)}")  # fmt: skip


def headline_figures(plan: Plan) -> Iterator[tuple[str, str]]:
    """The main figures as name and short text, for tiles; none without a model."""
    found = plan_summary(plan)
    if plan.estimate is None:
        return
    if found.step_seconds is not None:
        yield "step time", seconds_text(found.step_seconds)
        yield "tokens/s", count_text(found.tokens_per_second or 0)
        yield "MFU", f"{found.mfu or 0:.0%}"
    yield "memory on the device", bytes_text(found.device_bytes or 0)
    yield "allocated by tensors", bytes_text(found.allocated_bytes or 0)
    yield "parameters", count_text(plan.estimate.parameters)
    settings = training_settings(plan.job)
    yield "dtype", settings["dtype"]
    yield "global batch", f"{settings['global_batch_size']:,}"


def figures(plan: Plan) -> Iterator[tuple[str, str]]:
    """The main figures as name and text."""
    found = plan_summary(plan)
    if plan.estimate is None or found.device_bytes is None:
        return
    yield from _times(plan, found)
    need, have = bytes_text(found.device_bytes), found.device_memory_bytes
    room = f", which has {bytes_text(have)}" if have else ""
    tensors = bytes_text(found.allocated_bytes or 0)
    yield "memory", f"{need} on the device{room}; {tensors} allocated by tensors"
    from mpctl.spec.runtime import is_launched  # a plan without a model does not pay for it

    if is_launched(plan.job.training.runtime):
        yield "checkpoint", f"{bytes_text(plan.estimate.checkpoint_bytes)} on the disk"


def _times(plan: Plan, found: PlanSummary) -> Iterator[tuple[str, str]]:
    assert plan.estimate is not None
    time = plan.estimate.time
    if isinstance(time, str):
        yield "step time", f"not estimated: {time}"
        return
    band = f"{seconds_text(time.low)} to {seconds_text(time.high)}"
    yield "step time", f"{seconds_text(time.total)} (9 of 10 runs: {band})"
    yield "tokens/s", count_text(found.tokens_per_second or 0)
    yield from rates(found)


def rates(found: PlanSummary) -> Iterator[tuple[str, str]]:
    """Model and hardware FLOP/s of a rank, each under its name."""
    for name, word, rate, share in (
        ("MFU", "model", found.model_flops_per_second, found.mfu),
        ("HFU", "hardware", found.hardware_flops_per_second, found.hfu),
    ):
        yield name, f"{share or 0:.0%}: {rate_text(rate or 0)} of {word} FLOP a rank"


def layout_text(plan: Plan) -> str:
    """`1,024 ranks on 128 nodes x 8 GPUs of NVIDIA A100-SXM4-80GB`."""
    cluster = plan.job.cluster
    device, nodes = cluster.device, plural(cluster.nodes, "node")
    ranks = plural(plan.job.world_size, "rank")
    if device is not None and device.kind == "cpu":
        return f"{ranks} on {nodes}, each on {device.name}"
    where = f" of {device.name}" if device else ""
    return f"{ranks} on {nodes} x {plural(cluster.gpus_per_node or 1, 'GPU')}{where}"


def order_text(plan: Plan) -> str:
    """How ranks and layers are dealt out: `order tp-cp-dp-pp, 1f1b, vpp 3, sequence parallel`."""
    p = plan.job.parallel
    return ", ".join([
        f"order {p.order}", *([p.schedule] if p.pp > 1 else []),
        *([f"vpp {p.vpp}"] if p.vpp > 1 else []),
        *(["stages balanced by cost"] if p.stage_balance == "cost" else []),
        *(["sequence parallel"] if p.sequence_parallel else []),
    ])  # fmt: skip
