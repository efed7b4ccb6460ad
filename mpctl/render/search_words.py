"""What a search says in words and figures, the same in the terminal and on its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpctl.units import bytes_text, count_text, plural, seconds_text

AIMS = {
    "tokens": "most tokens a second",
    "memory": "least memory",
    "cost": "fewest GPU-hours a token",
}
WORDS = {
    "micro_batch_size": "micro batch",
    "sequence_parallel": "sequence parallelism",
    "stage_balance": "balance",
    "vpp": "chunks",
    "zero": "ZeRO",
}


def asked_text(document: dict[str, Any]) -> str:
    """`gpt3-175b on 1,024 GPUs of NVIDIA A100-SXM4-80GB: most tokens a second`."""
    name = document["model"] or document["job"] or "the model"
    gpus = document["best"][0]["gpus"] if document["best"] else document["gpus"]
    return f"{name} on {plural(gpus, 'GPU')} of {document['device']}: {AIMS[document['objective']]}"


def header_lines(document: dict[str, Any]) -> Iterator[str]:
    """What all layouts have in common, what was searched, and how many were estimated."""
    fixed = document["fixed"]
    names = ("micro_batch_size", "recompute", "zero")
    kept = [f"{_words(name)} {fixed[name]}" for name in names if name in fixed]
    free = ", ".join(_words(name) for name in document["searched"])
    searched = f"; searched: {free}" if free else ""
    yield ", ".join([document["dtype"], f"global batch {document['global_batch_size']}",
                     f"runtime {document['runtime']}", *kept]) + searched  # fmt: skip
    yield f"{plural(document['estimated'], 'layout')} estimated, the others ruled out by bounds"


def _words(name: str) -> str:
    return WORDS.get(name, name)


def notes(document: dict[str, Any]) -> Iterator[str]:
    """How far a measured step may lie from the first one's; what memory means."""
    first, have = document["best"][0], document["device_memory_bytes"]
    low, high = (seconds_text(first[f"step_seconds_{end}"]) for end in ("low", "high"))
    yield f"no. 1: 9 of 10 runs would take {low} to {high} a step"
    if first["extrapolates"]:
        yield f"extrapolated: {'; '.join(first['extrapolates'])}"
    if (
        any("price_per_billion_tokens" in entry for entry in document["best"])
        or document["by_gpus"]
    ):
        yield "Gtok: a billion tokens"
    yield f"memory: on the device of the fullest rank, which has {bytes_text(have)}"


def why_lines(document: dict[str, Any]) -> list[str]:
    """Each other layout beside no. 1, then the job's own."""
    lines = [f"no. {number} {text}" for number, text in enumerate(document["reasons"], start=2)]
    return [*lines, *([document["own_reason"]] if document["own_reason"] else [])]


def entry_cells(entry: dict[str, Any], *, has_cost: bool) -> list[str]:
    """Step time, tokens/s, MFU and memory of a layout, and what a billion tokens cost."""
    cells = [
        seconds_text(entry["step_seconds"]), count_text(entry["tokens_per_second"]),
        f"{entry['mfu']:.0%}", bytes_text(entry["peak_bytes"]),
    ]  # fmt: skip
    if has_cost:
        cells.append(count_text(entry["gpu_hours_per_billion_tokens"]))
    if "price_per_billion_tokens" in entry:
        cells.append(count_text(entry["price_per_billion_tokens"]))
    return cells
