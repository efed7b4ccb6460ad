"""Predicted against measured: step time, memory and bytes of layouts that ran on this machine.

A row is a layout. Its step time is the median over rounds of each run's median step after the
warm-up; its memory that of the fullest rank in one steady step; its bytes those of all messages of
a step, of a rank on the average. Parameters, states and messages must equal the plan exactly, step
time and memory are held against it by error = predicted / measured - 1.

A layout of more ranks than cores is a rehearsal: its time depends on how the system shares cores,
so that such layouts are judged apart (`GROUPS`).

By hand, runs of 0.42, 0.40 and 0.50 s where the plan says 0.44 s, and 0.40 to 0.48 in nine of ten:
error 0.44 / 0.42 - 1 = +4.8 %, and the measured 0.42 s lie inside of the band.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean, median
from typing import NotRequired

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.bench.accuracy import Accuracy, HeldFigure, accuracy_of
from mpctl.bench.report import BenchEnvelope, BenchRow, spread
from mpctl.bench.runner import CaseRun
from mpctl.bench.verify_layouts import layout_name
from mpctl.bench.waits import communication_share, planned_share
from mpctl.estimate.step import StepTime
from mpctl.launch.summary import plan_as_launched
from mpctl.planning.layout_settings import layout_of
from mpctl.planning.plan import Plan
from mpctl.rundir.summary import STATES, RankComparison

WITHIN, BEYOND, ALL = "within cores", "beyond cores", "all"
GROUPS = (WITHIN, BEYOND, ALL)
BUSY = 0.85  # of a step, that a lone rank computes at least


class VerifyRow(BenchRow):
    """A layout; its seconds are those of a step.

    predicted_seconds, low_seconds, high_seconds: the plan's, and the band of nine of ten measured
    steps; error: predicted / measured - 1; is_inside: whether the median step lies in the band.
    memory_bytes: most that a rank held at once in one step, planned_.. and .._error alike; None
    where it was not measured; reserved_bytes: what torch's allocator took from a GPU at most, None
    on CPUs. agrees: whether parameters, states and messages of every rank equal the plan; differs:
    the first that does not, in words. sent_bytes: of all messages of a step, of a rank on the
    average. device: cpu or cuda; cpu_seconds: processor time of rank 0 in a step.
    communication_share: of a step, that a rank waits in collectives (waits.py), predicted_.. alike.
    """

    job: str
    layout: str
    world_size: int
    device: str
    is_rehearsal: bool
    predicted_seconds: float
    low_seconds: float
    high_seconds: float
    error: float
    is_inside: bool
    cpu_seconds: float
    planned_memory_bytes: int | None
    memory_bytes: int | None
    memory_error: float | None
    reserved_bytes: NotRequired[int | None]
    agrees: bool
    differs: str
    planned_sent_bytes: float
    sent_bytes: float
    communication_share: float | None
    predicted_communication_share: float


class VerifyFindings(TypedDict):
    """What the layouts say together. groups: of step times, by `GROUPS`; memory: of all layouts;
    agreeing: layouts whose parameters, states and messages equal the plan; left_out: by name,
    layouts of the built-in set that cannot run here, with the reason; within: the bound of --within
    as a share of 1, judged: the group that it holds for, and passed: whether it does, None without
    a bound."""

    groups: dict[str, Accuracy]
    memory: Accuracy
    agreeing: int
    left_out: dict[str, str]
    within: float | None
    judged: str
    passed: bool | None


class VerifyReport(BenchEnvelope):
    """What `mpctl bench verify --json` prints, and OUT/report.json."""

    results: list[VerifyRow]
    findings: VerifyFindings


def verify_row(runs: Sequence[CaseRun]) -> VerifyRow:
    """The row of one case from all of its runs, at least one."""
    case = runs[0].case
    timing = spread([run.step_seconds for run in runs])
    ranks = [rank for run in runs for rank in run.summary["plan_beside_run"]]
    layout = layout_name(layout_of(case.job))
    return {
        "name": case.title,
        **timing,
        "job": case.job.name or case.title.removesuffix(layout).strip(),
        "layout": layout,
        "world_size": case.job.world_size,
        "device": case.job.launch.device,
        "is_rehearsal": case.job.world_size > runs[0].units,
        **_forecast(case.plan, timing["seconds"]),
        "cpu_seconds": median(record["cpu_seconds"] for run in runs for record in run.steady),
        **_memory(ranks),
        "reserved_bytes": max(
            (size for rank in ranks if (size := rank.get("reserved_memory_bytes"))), default=None
        ),
        "agrees": bool(ranks) and all(rank["agrees"] for rank in ranks),
        "differs": next(_differences(ranks), ""),
        **_sent(ranks),
        "communication_share": communication_share(runs),
    }


class _Forecast(TypedDict):
    predicted_seconds: float
    low_seconds: float
    high_seconds: float
    error: float
    is_inside: bool
    predicted_communication_share: float


def _forecast(plan: Plan, measured: float) -> _Forecast:
    estimate = plan_as_launched(plan).estimate
    assert estimate is not None and isinstance(estimate.time, StepTime), "such a case is refused"
    time = estimate.time
    return {
        "predicted_seconds": time.total,
        "low_seconds": time.low,
        "high_seconds": time.high,
        "error": time.total / measured - 1,
        "is_inside": time.low <= measured <= time.high,
        "predicted_communication_share": planned_share(time),
    }


class _Memory(TypedDict):
    planned_memory_bytes: int | None
    memory_bytes: int | None
    memory_error: float | None


def _memory(ranks: Iterable[RankComparison]) -> _Memory:
    """Peak memory of the fullest rank, planned and measured; they need not be the same rank."""
    peaks = [rank["memory"]["peak"] for rank in ranks if "peak" in rank["memory"]]
    if not peaks:
        return {"planned_memory_bytes": None, "memory_bytes": None, "memory_error": None}
    planned, measured = (max(peak[key] for peak in peaks) for key in ("planned", "measured"))
    return {
        "planned_memory_bytes": planned,
        "memory_bytes": measured,
        "memory_error": planned / measured - 1 if measured else None,
    }


class _Sent(TypedDict):
    planned_sent_bytes: float
    sent_bytes: float


def _sent(ranks: Sequence[RankComparison]) -> _Sent:
    traffic = [rank["step_traffic"] for rank in ranks]
    planned, measured = (
        mean(sum(entry["bytes"] for entry in each[key].values()) for each in traffic)
        if traffic else 0
        for key in ("planned", "measured")
    )  # fmt: skip
    return {"planned_sent_bytes": planned, "sent_bytes": measured}


def _differences(ranks: Iterable[RankComparison]) -> Iterator[str]:
    """What of a rank does not equal the plan, in words."""
    for rank in ranks:
        if rank["agrees"]:
            continue
        exact = {"parameters": rank["parameters"]}
        exact |= {kind: rank["memory"][kind] for kind in STATES if kind in rank["memory"]}
        for what, pair in exact.items():
            if pair["planned"] != pair["measured"]:
                yield _difference(rank, what, pair["planned"], pair["measured"])
        planned, measured = rank["step_traffic"]["planned"], rank["step_traffic"]["measured"]
        for what in dict.fromkeys([*planned, *measured]):
            if planned.get(what) != measured.get(what):
                yield _difference(rank, what, planned.get(what), measured.get(what))


def _difference(rank: RankComparison, what: str, planned: object, measured: object) -> str:
    return f"rank {rank['rank']}, {what}: planned {planned or 'none'}, ran {measured or 'none'}"


def verify_findings(
    rows: Sequence[VerifyRow], *, within: float | None, left_out: Mapping[str, str]
) -> VerifyFindings:
    """What these rows say together.

    within: the largest mean error, as a share of 1, that passes for layouts whose ranks have a core
    each; for all where there is no such layout.
    """
    groups = {name: accuracy_of(_times(_of_group(rows, name))) for name in GROUPS}
    judged = WITHIN if groups[WITHIN]["layouts"] else ALL
    mape = groups[judged]["mape"]
    return {
        "groups": groups,
        "memory": accuracy_of(list(_memories(rows))),
        "agreeing": sum(row["agrees"] for row in rows),
        "left_out": dict(left_out),
        "within": within,
        "judged": judged,
        "passed": None if within is None or mape is None else mape <= within,
    }


def _of_group(rows: Iterable[VerifyRow], group: str) -> list[VerifyRow]:
    return [row for row in rows if group == ALL or row["is_rehearsal"] == (group == BEYOND)]


def _times(rows: Iterable[VerifyRow]) -> list[HeldFigure]:
    return [
        HeldFigure(row["name"], row["predicted_seconds"], row["seconds"], row["is_inside"])
        for row in rows
    ]


def _memories(rows: Iterable[VerifyRow]) -> Iterator[HeldFigure]:
    for row in rows:
        planned, measured = row["planned_memory_bytes"], row["memory_bytes"]
        if planned and measured:
            yield HeldFigure(row["name"], planned, measured)


def disturbed(rows: Iterable[VerifyRow]) -> list[str]:
    """The layouts of a single rank on CPU that computed for less than `BUSY` of their step: with
    nobody to wait for, such a rank was waiting for its core, so that other programs had it."""
    return [
        row["name"] for row in rows
        if row["world_size"] == 1 and row["device"] == "cpu"
        and row["cpu_seconds"] < BUSY * row["seconds"]
    ]  # fmt: skip
