"""Published runs of LoRA, QLoRA and full fine-tuning beside their plans (recorded/finetune_runs.json).

A row is planned as it stands. Step: the plan's mean against the measured one, and whether its band
of 90 % contains that. Memory: the figure that the source prints (`details.memory_is`): allocated by
tensors, or reserved by the allocator, which also stands for what a source does not say. Every row
ran, so that it fits. Of rows with the same layout, which are one machine from several vendors, a mean counts
once: `weight` is 1 / their number.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from mpctl.plan.batch.rows import as_others_run, load_row
from mpctl.plan.planning.plan import make_plan
from tests.published import RECORDED

LAYOUT = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "dp": 1, "sequence_parallel": False, "zero": 0, "schedule": "1f1b"}
UNITS = {"peak_mem_gb": 1e9, "peak_mem_gib": 2**30}


@dataclass(frozen=True)
class Judged:
    """A row beside its plan. step, memory: (planned, measured) seconds and bytes, None where the source
    has none; inside: whether the band contains the measured step. why: why there is no plan."""

    id: str
    group: str
    has_adapter: bool
    weight: float
    step: tuple[float, float] | None
    inside: bool
    memory: tuple[float, float] | None
    fits: bool | None
    extrapolates: bool
    why: str = ""

    @property
    def step_error(self) -> float:
        """(planned - measured) / measured."""
        return error_of(self.step)

    @property
    def memory_error(self) -> float:
        """(planned - measured) / measured."""
        return error_of(self.memory)


def error_of(pair: tuple[float, float] | None) -> float:
    """The relative error of (planned, measured)."""
    assert pair is not None
    return pair[0] / pair[1] - 1


@cache
def finetuning_rows() -> tuple[dict[str, Any], ...]:
    """The rows, with models and clusters in full."""
    file = json.loads((RECORDED / "finetune_runs.json").read_text("utf-8"))
    return tuple(row | {"job": _whole(row["job"], file)} for row in file["rows"])


def _whole(job: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    cluster = job["cluster"]
    return {
        **job,
        "model": file["models"][job["model"]],
        "cluster": file["clusters"][cluster] if isinstance(cluster, str) else cluster,
        "parallel": LAYOUT | job["parallel"],
    }


@cache
def judged_rows() -> tuple[Judged, ...]:
    """All rows beside their plans."""
    rows = finetuning_rows()
    layouts = [json.dumps(row["job"], sort_keys=True) for row in rows]
    same = Counter(layouts)
    return tuple(judge(row, 1 / same[layout]) for row, layout in zip(rows, layouts, strict=True))


def judge(row: dict[str, Any], weight: float = 1.0) -> Judged:
    """Plan a row and compare it with what was measured."""
    loaded = load_row(row["job"])
    assert loaded.job is not None and not loaded.issues, (row["id"], loaded.issues)
    plan = make_plan(as_others_run(loaded.job)[0])
    measured, estimate = row["measured"], plan.estimate
    has_adapter = "adapter" in row["job"]["training"]
    if estimate is None:
        why = "; ".join(check.message for check in plan.errors)
        return Judged(row["id"], row["group"], has_adapter, weight, None, False, None, plan.fits, False, why)
    time, step, memory, inside, why = estimate.time, None, None, False, ""
    if isinstance(time, str):
        why = time
    elif (seconds := measured.get("step_seconds")) is not None:
        step, inside = (time.total, seconds), time.low <= seconds <= time.high
    for key in UNITS.keys() & measured.keys():
        memory = float(getattr(estimate.fullest_stage, memory_figure(row))), measured[key] * UNITS[key]
    is_beyond = isinstance(time, str) or bool(time.extrapolates)
    return Judged(row["id"], row["group"], has_adapter, weight, step, inside, memory, plan.fits, is_beyond, why)


def memory_figure(row: dict[str, Any]) -> str:
    """The figure of the plan that a row's peak is compared with."""
    said = row["details"].get("memory_is") or ""
    return "allocated_bytes" if "allocated" in said or "active" in said else "reserved_bytes"


@dataclass(frozen=True)
class Summary:
    """How near plans are to some rows: shares and errors in percent, weighted; None where no row has the figure."""

    rows: int
    step: float | None
    bias: float | None
    inside: float | None
    memory: float | None
    near: float | None
    fits: float


def summary(rows: Sequence[Judged]) -> Summary:
    """Step: mean absolute and mean error, share inside the band. Memory: mean absolute error, share within 10 %.
    fits: share that the plan says to fit."""
    steps, peaks = [r for r in rows if r.step], [r for r in rows if r.memory]
    return Summary(
        len(rows),
        mean_of(steps, [abs(r.step_error) for r in steps]),
        mean_of(steps, [r.step_error for r in steps]),
        mean_of(steps, [float(r.inside) for r in steps]),
        mean_of(peaks, [abs(r.memory_error) for r in peaks]),
        mean_of(peaks, [float(abs(r.memory_error) <= 0.1) for r in peaks]),
        mean_of(rows, [float(bool(r.fits)) for r in rows]) or 0.0,
    )


def mean_of(rows: Sequence[Judged], values: Iterable[float]) -> float | None:
    """A weighted mean in percent."""
    total = sum(row.weight for row in rows)
    return 100 * fmean(values, [row.weight for row in rows]) if total else None
