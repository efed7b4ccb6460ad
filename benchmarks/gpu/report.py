"""Tables of docs/gpu.md, each between two marks (measured.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.cases import Outcome
from benchmarks.gpu.shapes import Shape

PAGE = Path(__file__).parents[2] / "docs/gpu.md"
HEAD = (
    "| model | | ms a step | tokens/s | tensors | allocator | MFU | remarks |",
    "|---|---|---:|---:|---:|---:|---:|---|",
)


def training_table(outcomes: Sequence[Outcome], shapes: dict[str, Shape], peak: float) -> str:
    """A row a case. peak: measured FLOP/s of a bf16 product, of which MFU is a share."""
    rows = [_row(outcome, shapes[outcome.case.shape], peak) for outcome in outcomes]
    return "\n".join([*HEAD, *rows])


def _row(outcome: Outcome, shape: Shape, peak: float) -> str:
    case, found = outcome.case, outcome.figures
    if not found:
        return f"| {case.shape} | {case.who}: {case.name} | | | | | | {outcome.reason} |"
    rate = shape.batch * shape.seq / found["seconds"]
    cells = (
        case.shape, f"{case.who}: {case.name}", f"{found['seconds'] * 1e3:.1f}", f"{rate:,.0f}",
        _gib(found.get("bytes")), _gib(found.get("reserved")),
        f"{rate * shape.flops_per_token / peak:.1%}", "; ".join(_remarks(outcome)),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _remarks(outcome: Outcome) -> Iterator[str]:
    if "stall" in outcome.figures:
        save, stall = (outcome.figures[name] for name in ("save", "stall"))
        yield f"a checkpoint took {save:.1f} s, training waited {stall:.2f} s"
    if outcome.reason:
        yield outcome.reason


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.1f} GiB"


def goals(outcomes: Sequence[Outcome], shapes: dict[str, Shape], peak: float) -> str:
    """The goals of docs/gpu.md next to the measurements."""
    seconds = {(o.case.shape, o.case.who, o.case.name): o.figures["seconds"]
               for o in outcomes if o.figures}  # fmt: skip
    ours = seconds.get(("gpt-1.5b", "mpctl", "compiled"))
    if ours is None:
        return "GPT 1.5B was not measured."
    shape = shapes["gpt-1.5b"]
    lines = ["| goal | measured |", "|---|---|"]
    mfu = shape.batch * shape.seq / ours * shape.flops_per_token / peak
    lines.append(f"| MFU of GPT 1.5B at least 55 % | {mfu:.1%} |")
    peers = [s for (name, who, what), s in seconds.items()
             if name == "gpt-1.5b" and who == "torch" and what.endswith("compiled")]  # fmt: skip
    if peers:
        lines.append(
            f"| not slower than plain torch, compiled | {min(peers) / ours:.2f} x its speed |"
        )
    if dropped := seconds.get(("gpt-1.5b", "mpctl", "dropout 0.1")):
        lines.append(f"| dropout at most 12 % over none | {dropped / ours - 1:+.1%} |")
    stalls = {o.case.name: o.figures["stall"] for o in outcomes if "stall" in o.figures}
    thread, between = stalls.get("saved by a thread"), stalls.get("saved between two steps")
    if thread is not None and between:
        lines.append(f"| a thread's save stalls at most 15 % of one between steps | "
                     f"{thread / between:.1%} |")  # fmt: skip
    return "\n".join(lines)
