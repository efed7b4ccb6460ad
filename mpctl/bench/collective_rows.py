"""Rows of timed collectives, and the latency and bandwidth that fit them.

algbw is a message's bytes over its time; busbw multiplies it by the bytes that cross the busiest
link of a ring over those of the message (collectives.bus_factor), so that the link's bandwidth
bounds it whatever the kind and the number of ranks (nccl-tests, doc/PERFORMANCE.md).

A fit is time = latency + bus factor x bytes / bandwidth, with the least sum of squared relative
errors, so that small messages count as much as large ones. Its efficiency curve, busbw over the
fitted bandwidth by size, tells what the line does not.

By hand, 4 ranks, an all-reduce of 8 MB in 3 ms: algbw 2.67 GB/s, busbw 1.5 times that, 4 GB/s.
Times of 11 us for 1 kB and 110 us for 100 kB over a factor of 1: 10 us and 1 GB/s, without error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypedDict

from mpctl.bench.collective_cases import CollectiveCases, sent_over
from mpctl.bench.report import BenchRow, spread
from mpctl.calibrate.relative_fit import fit_relative
from mpctl.collectives import bus_factor
from mpctl.estimate.message import Message
from mpctl.estimate.network import MissingLink, Network
from mpctl.rundir.collective_files import CollectiveCase, CollectiveRound

FEWEST = 3  # sizes, from which a line of two figures can be off


class CollectiveRow(BenchRow):
    """One collective of one size. Its seconds are those of a call on the slowest rank; all groups
    of the axis ran it at once. axis: the group's name in plans; ranks: of a group; dtype: torch's
    name; op: sum, max or none; bytes: of the whole message; count: elements that the call names, as
    in nccl-tests; algbw, busbw: bytes/s; wrong: elements of all ranks that differ from the right
    result, -1 where they were not compared; is_rehearsal: more ranks on a node than cores (GPUs);
    predicted_seconds: the planner's, None where the cluster has no such link, or where a training
    run would send it another way.
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


def collective_rows(
    cases: CollectiveCases, rounds: Mapping[int, Sequence[CollectiveRound]]
) -> list[CollectiveRow]:
    """A row for each case that was timed. rounds: by the case's number."""
    network = Network(cases.plan.job.cluster, cases.topology)
    return [
        _row(cases, case, rounds[number], _predicted(cases, case, network))
        for number, case in enumerate(cases.cases)
        if number in rounds
    ]


def fit_collectives(rows: Iterable[CollectiveRow]) -> list[CollectiveFit]:
    """A fit for each kind, axis, number of ranks, transport and type of which FEWEST sizes or more
    were timed, in the rows' order."""
    groups: dict[tuple[str, str, int, str, str], list[CollectiveRow]] = {}
    for row in rows:
        key = row["kind"], row["axis"], row["ranks"], row["transport"], row["dtype"]
        groups.setdefault(key, []).append(row)
    return [_fit(own) for own in groups.values() if len({r["bytes"] for r in own}) >= FEWEST]


def _fit(rows: Sequence[CollectiveRow]) -> CollectiveFit:
    """The fit of one group's rows."""
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
    cases: CollectiveCases, case: CollectiveCase, rounds: Sequence[CollectiveRound],
    predicted: float | None,
) -> CollectiveRow:  # fmt: skip
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
        message = replace(message, kind="send", stages=(0, 1))
    try:
        return network.seconds(message)
    except MissingLink:
        return None
