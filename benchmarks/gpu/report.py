"""Tables of benchmarks/results/gpu.md, each between two marks (measured.py).

MFU is of two peaks: the data sheet's, and the rate of one large product, measured warm. Each counts
the model's FLOP without the half of attention that the causal mask leaves out, and in brackets with
it, as most published figures do. The goal is of the data sheet, the half deducted. All are shares
of the bf16 peak, in fp8 too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.cases import GPT, Outcome
from benchmarks.gpu.shapes import Shape
from mpctl.plan.estimate.flops import find_device

PAGE = Path(__file__).parents[2] / "benchmarks/results/gpu.md"
HEAD = (
    "| model | | ms a step (plan) | tokens/s | tensors (plan) | allocator (plan) | MFU of the sheet "
    "| MFU of a product | remarks |",
    "|---|---|---:|---:|---:|---:|---:|---:|---|",
)
GOAL_MFU, GOAL_DROPOUT, GOAL_STALL, GOAL_OFFLOAD = 0.52, 0.12, 0.15, 0.5
NEAR = 0.1  # how far tensors may lie from their plan without a remark


@dataclass(frozen=True)
class Peaks:
    """bf16 FLOP/s. sheet: the data sheet's, None for a device without a preset; product: of one
    large product, measured warm."""

    sheet: float | None
    product: float

    @classmethod
    def of(cls, name: str, product: float) -> Peaks:
        """Those of the device that reports this name."""
        device = find_device(name)
        return cls(device.peak_flops.get("bf16") if device else None, product)

    def __str__(self) -> str:
        sheet = f"{self.sheet / 1e12:,.1f} TFLOP/s" if self.sheet else "not known (no preset)"
        return f"bf16 peak of the data sheet {sheet}, measured {self.product / 1e12:,.1f} TFLOP/s"


def training_table(outcomes: Sequence[Outcome], shapes: dict[str, Shape], peaks: Peaks) -> str:
    """A row a case."""
    rows = [_row(outcome, shapes[outcome.case.shape], peaks) for outcome in outcomes]
    return "\n".join([*HEAD, *rows])


def _row(outcome: Outcome, shape: Shape, peaks: Peaks) -> str:
    case, found = outcome.case, outcome.figures
    if not found:
        return f"| {case.shape} | {case.who}: {case.name} | | | | | | | {outcome.reason} |"
    seconds = found["seconds"]
    rate = shape.batch * shape.seq / seconds
    planned = f" ({found['planned_seconds'] * 1e3:.1f})" if "planned_seconds" in found else ""
    memory = (
        " ".join(filter(None, (_gib(found.get(name)), _gib(found.get(f"planned_{name}"), "({})"))))
        for name in ("bytes", "reserved")
    )
    shares = (
        f"{mfu(shape, seconds, peak):.1%} ({mfu(shape, seconds, peak, halved=False):.1%})" if peak else ""
        for peak in (peaks.sheet, peaks.product)
    )
    cells = (
        case.shape,
        f"{case.who}: {case.name}",
        f"{seconds * 1e3:.1f}{planned}",
        f"{rate:,.0f}",
        *memory,
        *shares,
        "; ".join(_remarks(outcome)),
    )
    return f"| {' | '.join(cells)} |"


def mfu(shape: Shape, seconds: float, peak: float, *, halved: bool = True) -> float:
    """The share of the peak that the model's FLOP of a step take. halved: without the half of
    attention that the causal mask leaves out."""
    each = shape.causal_flops_per_token if halved else shape.flops_per_token
    return shape.batch * shape.seq * each / seconds / peak


def _remarks(outcome: Outcome) -> Iterator[str]:
    found = outcome.figures
    if "stall" in found:
        save, stall = (found[name] for name in ("save", "stall"))
        yield f"a checkpoint took {save:.1f} s, training waited {stall:.2f} s for the second"
    if not found.get("agrees", True):
        yield "not as planned: parameters, states or messages (summary.json)"
    if "planned_bytes" in found and abs(found["bytes"] / found["planned_bytes"] - 1) > NEAR:
        yield f"tensors {found['bytes'] / found['planned_bytes'] - 1:+.0%} of their plan"
    if outcome.reason:
        yield outcome.reason


def _gib(size: float | None, form: str = "{}") -> str:
    return "" if size is None else form.format(f"{size / 2**30:.1f} GiB")


def goals(outcomes: Sequence[Outcome], shapes: dict[str, Shape], peaks: Peaks) -> str:
    """The goals of benchmarks/results/gpu.md next to the measurements."""
    seconds = {(o.case.shape, o.case.who, o.case.name): o.figures["seconds"] for o in outcomes if o.figures}
    found = {name: seconds.get((GPT, "mpctl", name)) for name in ("layer by layer", "compiled", "dropout 0.1")}
    plain = found["layer by layer"]
    if plain is None:
        return "GPT 1.5B was not measured."
    best = min(plain, found["compiled"] or plain)
    lines = ["| goal | measured |", "|---|---|"]
    share = f"{mfu(shapes[GPT], best, peaks.sheet):.1%}" if peaks.sheet else "peak not known"
    lines.append(f"| MFU of GPT 1.5B at least {GOAL_MFU:.0%} of the data sheet, causal half deducted | {share} |")
    peers = [
        s for (name, who, what), s in seconds.items() if name == GPT and who == "torch" and what.endswith("compiled")
    ]
    if peers:
        lines.append(f"| not slower than plain torch, compiled | {min(peers) / best:.2f} x its speed |")
    if dropped := found["dropout 0.1"]:
        lines.append(f"| dropout at most {GOAL_DROPOUT:.0%} over none | {dropped / plain - 1:+.1%} |")
    stalls = {o.case.name: o.figures["stall"] for o in outcomes if "stall" in o.figures}
    thread, between = stalls.get("saved by a thread"), stalls.get("saved between two steps")
    if thread is not None and between:
        lines.append(
            f"| a thread's save stalls at most {GOAL_STALL:.0%} of one between steps | {thread / between:.1%} |"
        )
    if freed := offload_savings(outcomes):
        lines.append(
            f"| offload frees at least {GOAL_OFFLOAD:.0%} of what is planned, of the "
            f"allocator's memory | {_gib(freed[0])} of {_gib(freed[1])} |"
        )
    return "\n".join(lines)


def offload_savings(outcomes: Sequence[Outcome]) -> tuple[float, float] | None:
    """Bytes that the allocator takes less with offloaded inputs than without, measured and planned;
    None where not both cases were measured on a GPU.

    By the allocator's memory: that of tensors falls when one is freed, whether or not its memory
    can be used again while a copy of it is under way.
    """
    of = {o.case.name: o.figures for o in outcomes if o.case.shape == GPT and o.case.who == "mpctl"}
    kept, moved = of.get("recompute full", {}), of.get("recompute full, offloaded", {})
    if not ("reserved" in kept and "reserved" in moved):
        return None
    measured = kept["reserved"] - moved["reserved"]
    return measured, kept["planned_reserved"] - moved["planned_reserved"]


def offload_falls_short(outcomes: Sequence[Outcome]) -> str:
    """What is wrong where offload frees less than half of what is planned; else empty."""
    freed = offload_savings(outcomes)
    if freed is None or freed[0] >= GOAL_OFFLOAD * freed[1]:
        return ""
    return f"offload frees {_gib(freed[0])} of the allocator's memory, planned {_gib(freed[1])}"
