"""Runs of cases by hand, as `mpctl bench verify` gets them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from mpctl.measure.bench.cases import PlannedCase
from mpctl.measure.bench.report import BenchEnvironment
from mpctl.measure.bench.runner import CaseRun
from mpctl.measure.bench.verify import Verification
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.summary import RankComparison, RunSummary
from tests.measure.bench.reports import ENVIRONMENT
from tests.measure.bench.small_jobs import planned_case, step_records

TWO_CORES = cast(BenchEnvironment, ENVIRONMENT)


def case_of(title: str, **settings: Any) -> PlannedCase:
    """A planned case of `demo`; settings with __ for a dot."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return replace(planned_case(title, **named), title=title)


def rank_of(rank: int = 0, *, peak: tuple[int, int] | None = (100, 100), **other: Any) -> Any:
    """Plan and run of a rank that agree, but for what is given: peak, planned and measured;
    parameters and sent alike."""
    (parameters, had), (sent, did) = (other.get(k, (10, 10)) for k in ("parameters", "sent"))
    compared: dict[str, Any] = {
        "rank": rank,
        "agrees": parameters == had and sent == did,
        "parameters": {"planned": parameters, "measured": had},
        "step_traffic": {
            "planned": {"tp all_reduce": {"count": 2, "bytes": sent}},
            "measured": {"tp all_reduce": {"count": 2, "bytes": did}},
        },
        "peak_memory_bytes": 1000,
        "memory": {"optimizer": {"planned": 5, "measured": 5}},
    }
    if peak is not None:
        compared["memory"]["peak"] = {"planned": peak[0], "measured": peak[1]}
    return cast(RankComparison, compared)


def run_of(case: PlannedCase, seconds: float, *ranks: Any, number: int = 0) -> CaseRun:
    """A run whose steps after the warm-up take so many seconds."""
    summary = cast(RunSummary, {"plan_beside_run": list(ranks or [rank_of()])})
    records = step_records([9, 9, seconds, seconds, seconds])
    return CaseRun(case, number, RunDir(case.name), records, [], summary, 2)


def forecast(case: PlannedCase) -> float:
    """The plan's step time in seconds."""
    estimate = case.plan.estimate
    assert estimate is not None and estimate.step_seconds is not None
    return estimate.step_seconds


def verification(**more: Any) -> Verification:
    """Three layouts in one round, the last of more ranks than cores; two of them have run."""
    four = {"cluster__gpus_per_node": 4, "parallel__tp": 4}
    cases = [case_of("1 rank"), case_of("tp4", **four), case_of("not yet")]
    runs = [run_of(cases[0], 1.1 * forecast(cases[0])), run_of(cases[1], 1.0, rank_of(sent=(1, 2)))]
    return Verification(TWO_CORES, "mpctl bench verify", 1, cases, "demo", runs=runs, **more)
