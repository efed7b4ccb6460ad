"""Predicted against measured: step time, memory and bytes of layouts that ran on this machine.

    error = predicted / measured - 1        MAPE = mean of |error|        bias = mean of error

A row is a layout. Its step time is the median over rounds of each run's median step after the
warm-up; its memory that of the fullest rank in one steady step; its bytes those of all messages of
a step, averaged over ranks. Parameters, states and messages must equal the plan exactly.

Spearman's rank correlation shows whether the layouts are in the predicted order, which a search
relies on. Coverage is the share of layouts whose measured step is within the plan's band; a band
should contain nine of ten. A layout of more ranks than cores is a rehearsal: its time depends on
how the system shares cores, so that such layouts are counted separately (`GROUPS`).

Runs of 0.42, 0.40 and 0.50 s where the plan says 0.44 s, and 0.40 to 0.48 in nine of ten: error
0.44 / 0.42 - 1 = +4.8 %, and the measured 0.42 s are inside the band.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import StatisticsError, correlation, mean, median
from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.measure.bench.layouts import layout_name
from mpctl.measure.bench.report import BenchEnvelope, BenchRow, envelope, spread
from mpctl.measure.bench.runner import CaseBench, CaseRun, communication_share, group_runs, hosts_of, planned_share
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.planning.layout_settings import layout_of
from mpctl.records.rundir.summary import STATES, RankComparison
from mpctl.run.launch.summary import plan_as_launched


class Accuracy(TypedDict):
    """The accuracy of the predictions of some layouts; a figure is None if unknown.

    layouts: number of compared layouts; mape, bias, worst: shares, 0.1 for 10 %; worst: the error
    that is farthest from 0, of the layout worst_name; spearman: -1..1, of three layouts and more;
    coverage: the share of layouts whose measurement is within the band of its prediction.
    """

    layouts: int
    mape: float | None
    bias: float | None
    worst: float | None
    worst_name: str | None
    spearman: float | None
    coverage: float | None


@dataclass(frozen=True, slots=True)
class HeldFigure:
    """A predicted and a measured figure of one layout, both above 0.

    is_inside: whether the measurement is within the prediction's band; None where it has none.
    """

    name: str
    predicted: float
    measured: float
    is_inside: bool | None = None

    @property
    def error(self) -> float:
        """Relative error of the prediction, positive if it is too high.

        >>> HeldFigure("tp2", predicted=3.0, measured=4.0).error
        -0.25
        """
        return self.predicted / self.measured - 1


NOTHING: Accuracy = {
    "layouts": 0,
    "mape": None,
    "bias": None,
    "worst": None,
    "worst_name": None,
    "spearman": None,
    "coverage": None,
}


LEAST_SWEEP = 3  # layouts; two are ranked right by chance half the time


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation of the pairs, in -1..1: Pearson's of their ranks, where equal
    values have the mean of the ranks that they take. Raises statistics.StatisticsError for fewer
    than two pairs, and where all values of one side are equal.

    >>> spearman([(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)])  # 1 - 6 x 2 / (3 x 8)
    0.5
    """
    return correlation(_ranks([a for a, _ in pairs]), _ranks([b for _, b in pairs]))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values have the mean of their ranks."""
    in_order = sorted(values)
    return [(bisect_left(in_order, v) + bisect_right(in_order, v) + 1) / 2 for v in values]


def accuracy_of(comparisons: Sequence[HeldFigure]) -> Accuracy:
    """The accuracy of all these predictions."""
    if not comparisons:
        return {**NOTHING}
    worst = max(comparisons, key=lambda each: abs(each.error))
    inside = [each.is_inside for each in comparisons if each.is_inside is not None]
    return {
        "layouts": len(comparisons),
        "mape": mean(abs(each.error) for each in comparisons),
        "bias": mean(each.error for each in comparisons),
        "worst": worst.error,
        "worst_name": worst.name,
        "spearman": _order([(each.predicted, each.measured) for each in comparisons]),
        "coverage": mean(inside) if inside else None,
    }


def _order(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation; None with too few layouts or only equal figures."""
    if len(pairs) < LEAST_SWEEP:
        return None
    try:
        return spearman(pairs)
    except StatisticsError:
        return None


WITHIN, BEYOND, ALL = "within cores", "beyond cores", "all"
GROUPS = (WITHIN, BEYOND, ALL)
BUSY = 0.85  # of a step, that a lone rank computes at least


class VerifyRow(BenchRow):
    """A layout; its seconds are those of a step.

    predicted_seconds, low_seconds, high_seconds: the plan's, and the band of nine of ten measured
    steps; error: predicted / measured - 1; is_inside: whether the median step is in the band.
    memory_bytes: most that a rank held at once in one step, planned_.. and .._error alike; None
    where it was not measured; reserved_bytes: what torch's allocator took from a GPU at most, None
    on CPUs. agrees: whether parameters, states and messages of every rank equal the plan; differs:
    the first that does not, in words. sent_bytes: of all messages of a step, averaged over ranks.
    device: cpu or cuda; cpu_seconds: processor time of rank 0 in a step. communication_share: of a
    step, that a rank waits in collectives (waits.py), predicted_.. alike.
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
    """The figures of all layouts together. groups: of step times, by `GROUPS`; memory: of all
    layouts; agreeing: layouts whose parameters, states and messages equal the plan; left_out: by
    name, layouts of the built-in set that cannot run here, with the reason; within: the bound of
    --within as a share of 1, judged: the group that it applies to, and passed: whether it holds,
    None without a bound."""

    groups: dict[str, Accuracy]
    memory: Accuracy
    agreeing: int
    left_out: dict[str, str]
    within: float | None
    judged: str
    passed: bool | None


class VerifyReport(BenchEnvelope):
    """Output of `mpctl bench verify --json`, also written to OUT/report.json."""

    results: list[VerifyRow]
    findings: VerifyFindings


def verify_row(runs: Sequence[CaseRun]) -> VerifyRow:
    """The row of one case from all of its runs, at least one."""
    case = runs[0].case
    timing = spread([run.step_seconds for run in runs])
    ranks = [rank for run in runs for rank in run.summary["plan_beside_run"]]
    layout = layout_name(layout_of(case.job))
    estimate = plan_as_launched(case.plan).estimate
    assert estimate is not None and isinstance(estimate.time, StepTime), "such a case is refused"
    time, seconds = estimate.time, timing["seconds"]
    planned_peak, peak = (_fullest(ranks, key) for key in ("planned", "measured"))
    return {
        "name": case.title,
        **timing,
        "job": case.job.name or case.title.removesuffix(layout).strip(),
        "layout": layout,
        "world_size": case.job.world_size,
        "device": case.job.launch.device,
        "is_rehearsal": case.job.world_size > runs[0].units,
        "predicted_seconds": time.total,
        "low_seconds": time.low,
        "high_seconds": time.high,
        "error": time.total / seconds - 1,
        "is_inside": time.low <= seconds <= time.high,
        "predicted_communication_share": planned_share(time),
        "cpu_seconds": median(record["cpu_seconds"] for run in runs for record in run.steady),
        "planned_memory_bytes": planned_peak,
        "memory_bytes": peak,
        "memory_error": planned_peak / peak - 1 if planned_peak is not None and peak else None,
        "reserved_bytes": max((size for rank in ranks if (size := rank.get("reserved_memory_bytes"))), default=None),
        "agrees": bool(ranks) and all(rank["agrees"] for rank in ranks),
        "differs": next(_differences(ranks), ""),
        "planned_sent_bytes": _mean_sent(ranks, "planned"),
        "sent_bytes": _mean_sent(ranks, "measured"),
        "communication_share": communication_share(runs),
    }


Side = Literal["planned", "measured"]


def _fullest(ranks: Iterable[RankComparison], side: Side) -> int | None:
    """Peak memory of the fullest rank, planned or measured: they need not be the same rank."""
    peaks = [rank["memory"]["peak"] for rank in ranks if "peak" in rank["memory"]]
    return max((peak[side] for peak in peaks), default=None)


def _mean_sent(ranks: Sequence[RankComparison], side: Side) -> float:
    sent = [sum(entry["bytes"] for entry in rank["step_traffic"][side].values()) for rank in ranks]
    return mean(sent) if sent else 0


def _differences(ranks: Iterable[RankComparison]) -> Iterator[str]:
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


def verify_findings(rows: Sequence[VerifyRow], *, within: float | None, left_out: Mapping[str, str]) -> VerifyFindings:
    """The findings of these rows.

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
    return [HeldFigure(row["name"], row["predicted_seconds"], row["seconds"], row["is_inside"]) for row in rows]


def _memories(rows: Iterable[VerifyRow]) -> Iterator[HeldFigure]:
    for row in rows:
        planned, measured = row["planned_memory_bytes"], row["memory_bytes"]
        if planned and measured:
            yield HeldFigure(row["name"], planned, measured)


def disturbed(rows: Iterable[VerifyRow]) -> list[str]:
    """The layouts of a single rank on CPU that computed for less than `BUSY` of their step: with no
    other ranks to wait for, such a rank waited for its core, which other programs used."""
    return [
        row["name"]
        for row in rows
        if row["world_size"] == 1 and row["device"] == "cpu" and row["cpu_seconds"] < BUSY * row["seconds"]
    ]


@dataclass
class Verification(CaseBench):
    """Cases that are run and compared with their plans.

    job: the name of the one job whose layouts they are, None for several; within: the largest mean
    error that passes, a share of 1; left_out: layouts that are not run, with the reason.
    """

    job: str | None
    within: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    def report(self) -> VerifyReport:
        rows = [verify_row(own) for own in group_runs(self.runs).values()]
        return {
            **envelope(
                "verify",
                self.job,
                self.environment,
                self.command,
                is_complete=self.is_complete,
                hosts=hosts_of(self.runs),
            ),
            "results": rows,
            "findings": verify_findings(rows, within=self.within, left_out=self.left_out),
        }
