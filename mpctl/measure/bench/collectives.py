"""Collectives along the axes of a layout: timed by its ranks, as rows, fits and a report.

The ranks are a launch on the hosts of any backend (measure/bench/probe.py) that train nothing; they take
the cases in turns (train/runtime/probes/collectives.py). Sizes, columns and definitions are nccl-tests'
(doc/PERFORMANCE.md): algbw is a message's bytes over its time; busbw multiplies it by the bytes
that cross the busiest link of a ring over those of the message (collectives.bus_factor), so that
the link's bandwidth bounds it whatever the kind and the number of ranks.

A fit is time = latency + bus factor x bytes / bandwidth, with the least sum of squared relative
errors, so that small messages count as much as large ones. Its efficiency curve is busbw over the
fitted bandwidth by size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.collectives import bus_factor
from mpctl.measure.bench.collective_cases import CollectiveCases, sent_over
from mpctl.measure.bench.probe import RankBench
from mpctl.measure.bench.report import BenchEnvelope, BenchRow, envelope, spread
from mpctl.plan.estimate.communication import Message
from mpctl.plan.estimate.network import MissingLink, Network
from mpctl.records.rundir.requests import (
    AbsentTransport,
    CollectiveAnswer,
    CollectiveCase,
    CollectiveRound,
    CollectivesRequest,
)
from mpctl.run.hosts.machine import Machine

FEWEST = 3  # sizes, from which a line of two figures can be off


class CollectiveRow(BenchRow):
    """One collective of one size. Its seconds are those of a call on the slowest rank; all groups
    of the axis ran it at once. axis: the group's name in plans; ranks: of a group; dtype: torch's
    name; op: sum, max or none; bytes: of the full message; count: elements that the call names, as
    in nccl-tests; algbw, busbw: bytes/s; wrong: elements of all ranks that differ from the right
    result, -1 where they were not compared; is_rehearsal: more ranks on a node than cores (GPUs);
    predicted_seconds: the planner's, None where the cluster has no such link, or where a training
    run would use another transport.
    """

    kind: str
    axis: str
    ranks: int
    transport: str
    dtype: str
    op: str
    bytes: int
    count: int
    algbw: float
    busbw: float
    wrong: int
    is_rehearsal: bool
    predicted_seconds: float | None


class CollectiveFit(TypedDict):
    """The line through the sizes of one kind, axis and transport. latency: seconds of a message
    without bytes; bandwidth: of the bus, bytes/s, None where the times do not grow with the sizes;
    efficiency: [bytes, busbw over bandwidth] by size; error: mean absolute relative error of the
    line's seconds."""

    kind: str
    axis: str
    ranks: int
    transport: str
    dtype: str
    latency: float
    bandwidth: float | None
    efficiency: list[tuple[int, float]]
    error: float


def fit_collectives(rows: Iterable[CollectiveRow]) -> list[CollectiveFit]:
    """A fit for each kind, axis, number of ranks, transport and type with at least FEWEST timed
    sizes, in the rows' order."""
    groups: dict[tuple[str, str, int, str, str], list[CollectiveRow]] = {}
    for row in rows:
        key = row["kind"], row["axis"], row["ranks"], row["transport"], row["dtype"]
        groups.setdefault(key, []).append(row)
    return [_fit(own) for own in groups.values() if len({r["bytes"] for r in own}) >= FEWEST]


def fit_relative(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The figures x >= 0, one a column of `terms`, with the least relative error of terms x seconds: a
    message of 1 KiB is as right in its percents as one of 64 MiB.

    terms: for each measurement, the coefficient of each figure; seconds: measured, above 0.

    >>> [round(x, 9) for x in fit_relative([[1e6, 1], [3e6, 1]], [3e-3, 5e-3])]
    [1e-09, 0.002]
    """
    import numpy as np
    from scipy.optimize import nnls

    rows = np.asarray(terms, dtype=float) / np.asarray(seconds)[:, None]
    length = np.linalg.norm(rows, axis=0)
    length[length == 0] = 1.0
    found, _ = nnls(rows / length, np.ones(len(rows)))
    return [float(x) for x in found / length]


def _fit(rows: Sequence[CollectiveRow]) -> CollectiveFit:
    first, factor = rows[0], bus_factor(rows[0]["kind"], rows[0]["ranks"])
    sizes, seconds = [factor * row["bytes"] for row in rows], [row["seconds"] for row in rows]
    pace, latency = fit_relative([(size, 1.0) for size in sizes], seconds)
    bandwidth = 1 / pace if pace else None
    fitted = [latency + size * pace for size in sizes]
    return {
        "kind": first["kind"],
        "axis": first["axis"],
        "ranks": first["ranks"],
        "transport": first["transport"],
        "dtype": first["dtype"],
        "latency": latency,
        "bandwidth": bandwidth,
        "efficiency": [(row["bytes"], row["busbw"] * pace) for row in rows if pace],
        "error": fmean(abs(a / b - 1) for a, b in zip(fitted, seconds, strict=True)),
    }


def _row(
    cases: CollectiveCases, case: CollectiveCase, rounds: Sequence[CollectiveRound], predicted: float | None
) -> CollectiveRow:
    kind, axis, ranks = case["kind"], case["axis"], cases.sizes[case["axis"]]
    times = spread([one["seconds"] for one in rounds])
    algbw = case["bytes"] / times["seconds"]
    return {
        "name": f"{kind} {axis}{ranks} {case['dtype']} {case['bytes']} {case['transport']}",
        **times,
        "kind": kind,
        "axis": axis,
        "ranks": ranks,
        "transport": case["transport"],
        "dtype": case["dtype"],
        "op": case["op"],
        "bytes": case["bytes"],
        "count": case["count"],
        "algbw": algbw,
        "busbw": algbw * bus_factor(kind, ranks),
        "wrong": max(one["wrong"] for one in rounds),
        "is_rehearsal": cases.is_rehearsal,
        "predicted_seconds": predicted,
    }


def _predicted(cases: CollectiveCases, case: CollectiveCase, network: Network) -> float | None:
    kind, axis = case["kind"], case["axis"]
    if case["transport"] != sent_over(cases, kind, axis):
        return None
    message = Message(axis, kind, "a message", case["bytes"])
    if kind == "sendrecv":
        if axis != "pp":
            return None  # plans send from rank to rank between stages alone
        message = message._replace(kind="send", stages=(0, 1))
    try:
        return network.seconds(message)
    except MissingLink:
        return None


class AbsentWay(TypedDict):
    """A transport that groups of an axis do not have, so that nothing was timed over it."""

    axis: str
    transport: str


class CollectiveFindings(TypedDict):
    """The timed layout, and the fitted lines. layout: ranks of a group, by axis; is_rehearsal: more
    ranks on a node than cores (GPUs); iterations, warm_up: calls of a round; root: rank of the
    group; absent: transports that some axis does not have."""

    layout: dict[str, int]
    ranks: int
    is_rehearsal: bool
    iterations: int
    warm_up: int
    root: int
    fits: list[CollectiveFit]
    absent: list[AbsentWay]


class CollectivesReport(BenchEnvelope):
    """Output of `mpctl bench collectives --json`."""

    results: list[CollectiveRow]
    findings: CollectiveFindings


@dataclass
class CollectiveBench(RankBench):
    """Collectives along the axes of a layout. absent: transports that groups of an axis do not
    have, whose cases are left out."""

    cases: CollectiveCases
    absent: list[AbsentTransport] = field(default_factory=list)

    timing = "time the collectives"

    @property
    def round_timings(self) -> int:
        """The number of cases whose axis has their transport."""
        absent = {(way["axis"], way["transport"]) for way in self.absent}
        return sum((case["axis"], case["transport"]) not in absent for case in self.cases.cases)

    def request(self) -> CollectivesRequest:
        options = self.cases.options
        return {
            "task": "collectives",
            "cases": list(self.cases.cases),
            "rounds": self.rounds,
            "iterations": options.iterations,
            "warm_up": options.warm_up,
            "root": options.root,
            "check": options.check,
            "seconds": options.seconds,
        }

    def take(self, answer: CollectiveAnswer) -> None:
        if answer["event"] == "absent":
            self.absent.append(answer)
        else:
            self.timings.append(answer)

    def use(self, machine: Machine) -> None:
        self.cases = self.cases.on_hosts(machine)

    @property
    def rows(self) -> list[CollectiveRow]:
        """A row for each case that was timed."""
        rounds: dict[int, list[CollectiveRound]] = {}
        for timing in self.timings:
            rounds.setdefault(timing["case"], []).append(timing)
        network = Network(self.plan.job.cluster, self.cases.topology)
        return [
            _row(self.cases, case, rounds[number], _predicted(self.cases, case, network))
            for number, case in enumerate(self.cases.cases)
            if number in rounds
        ]

    def report(self) -> CollectivesReport:
        cases, rows = self.cases, self.rows
        return {
            **envelope(
                "collectives",
                self.plan.job.name,
                self.environment,
                self.command,
                is_complete=self.is_complete,
                hosts=self.hosts,
            ),
            "results": rows,
            "findings": {
                "layout": {axis: ranks for axis, ranks in cases.sizes.items() if ranks > 1},
                "ranks": cases.topology.world_size,
                "is_rehearsal": cases.is_rehearsal,
                "iterations": cases.options.iterations,
                "warm_up": cases.options.warm_up,
                "root": cases.options.root,
                "fits": fit_collectives(rows),
                "absent": [{"axis": way["axis"], "transport": way["transport"]} for way in self.absent],
            },
        }
