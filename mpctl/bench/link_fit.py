"""The link inside a node from collectives that were measured: what the planner's network needs.

A collective of n ranks in one node takes, of the message's bytes (estimate/network.py),

    bus factor x bytes / bandwidth + start + phases (n - 1) x latency

with 2 phases for an all-reduce and one for the others, and an all-reduce may have a bandwidth of
its own. All four figures follow at once from all kinds, sizes and numbers of ranks, by the least
relative error. `bandwidth` of the preset is the best bus bandwidth that was seen, `efficiency` what
large messages reach of it by the fit.

By hand, two ranks at 2 GB/s and 50 us: an all-gather of 8 MB takes 1/2 x 8 MB / 2 GB/s + 50 us =
2.05 ms, an all-reduce 4.1 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from mpctl.bench.collective_rows import CollectiveRow
from mpctl.calibrate.relative_fit import fit_relative
from mpctl.collectives import bus_factor, get_collective
from mpctl.spec.cluster import InnerLinkSpec
from mpctl.units import bytes_text, plural

TRANSPORTS = ("nccl", "shared", "gloo")  # as a run chooses among those that its groups have
SMALLEST = 1e3  # bytes/s that a preset may hold, and its reverse
REDUCING = (0.01, 100.0)  # an all-reduce's bandwidth over that of other kinds


@dataclass(frozen=True)
class LinkFit:
    """The link, the mean relative error of the fit, and comments of its preset by key."""

    link: InnerLinkSpec
    error: float
    comments: Mapping[str, str]


def training_rows(rows: Sequence[CollectiveRow]) -> list[CollectiveRow]:
    """The rows of the way in which runs send: of each kind those of the first of TRANSPORTS that
    was measured. Messages between two ranks that go another way than collectives are left out: they
    are few, and the node has one link."""
    kinds = {row["kind"] for row in rows}
    chosen = {
        kind: min((row["transport"] for row in rows if row["kind"] == kind), key=TRANSPORTS.index)
        for kind in kinds
    }
    first = min(chosen.values(), key=TRANSPORTS.index)
    if chosen.get("sendrecv") != first:
        chosen.pop("sendrecv", None)
    return [row for row in rows if row["transport"] == chosen.get(row["kind"])]


def fit_link(rows: Sequence[CollectiveRow], *, name: str | None) -> LinkFit:
    """The link that these collectives of ranks on one node crossed. rows: at least one, of two
    ranks or more. name: what the link is, in pictures, None where that is not known."""
    own = training_rows(rows)
    terms, seconds = [_terms(row) for row in own], [row["seconds"] for row in own]
    a_byte, a_reduced, start, latency = fit_relative(terms, seconds)
    a_byte = a_byte or a_reduced or 1 / SMALLEST
    ratio = a_byte / a_reduced if a_reduced else 1.0
    best = max(max(map(_bus_bandwidth, own)), 1 / a_byte)
    link = InnerLinkSpec(
        name=name,
        bandwidth=best,
        efficiency=1 / a_byte / best,
        latency=latency,
        start=start,
        all_reduce=min(max(ratio, REDUCING[0]), REDUCING[1]),
    )
    fitted = (_sum(term, (a_byte, a_byte / link.all_reduce, start, latency)) for term in terms)
    errors = [abs(a / b - 1) for a, b in zip(fitted, seconds, strict=True)]
    return LinkFit(link, fmean(errors), _comments(own, fmean(errors)))


def _terms(row: CollectiveRow) -> tuple[float, float, float, float]:
    """By what a byte, a byte of an all-reduce, the start and a latency are multiplied."""
    kind = "send" if row["kind"] == "sendrecv" else row["kind"]
    sent, phases = bus_factor(kind, row["ranks"]) * row["bytes"], get_collective(kind).phases
    reduced = phases == 2
    steps = 1 if kind == "send" else phases * (row["ranks"] - 1)
    return (0.0 if reduced else sent), (sent if reduced else 0.0), 1.0, float(steps)


def _bus_bandwidth(row: CollectiveRow) -> float:
    plain, reduced, *_ = _terms(row)
    return (plain + reduced) / row["seconds"]


def _sum(terms: Sequence[float], figures: Sequence[float]) -> float:
    return sum(a * x for a, x in zip(terms, figures, strict=True))


def _comments(rows: Sequence[CollectiveRow], error: float) -> dict[str, str]:
    sizes, kinds = [row["bytes"] for row in rows], sorted({row["kind"] for row in rows})
    ways = ", ".join(sorted({row["transport"] for row in rows}))
    most = max(row["ranks"] for row in rows)
    return {
        "bandwidth": f"the best bus bandwidth of {', '.join(kinds)} over {ways}",
        "efficiency": f"what the fit of {bytes_text(min(sizes))} to {bytes_text(max(sizes))} by "
        f"up to {plural(most, 'rank')} reaches of it; its mean error {100 * error:.0f} %",
        "latency": "a step of the ring",
        "all_reduce": "its bandwidth over that of the others",
    }
