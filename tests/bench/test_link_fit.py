"""The link of a node: what was put in is found, and the network then takes as long as measured."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.bench.collectives import CollectiveRow
from mpctl.bench.machine_fit import LinkFit, fit_link, training_rows
from mpctl.estimate.network import Route
from mpctl.spec.cluster import InnerLinkSpec

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SIZES = (2**10, 2**16, 2**22, 2**26)


def measured(kind: str, ranks: int, size: int, link: InnerLinkSpec) -> CollectiveRow:
    """A collective that took what the planner's network says of this link."""
    pace = 1 / (link.bandwidth * link.efficiency)
    route = Route(ranks, 1, pace, link.start, link.latency, 0.0, link.all_reduce)
    seconds = (
        size * pace + link.start + link.latency
        if kind == "sendrecv"
        else route.collective(kind, size)
    )
    row = {"kind": kind, "ranks": ranks, "transport": "shared", "bytes": size, "seconds": seconds}
    return cast(CollectiveRow, row)


def fit_of(link: InnerLinkSpec, ranks: tuple[int, ...] = (2, 4)) -> LinkFit:
    rows = [measured(kind, n, size, link) for kind in KINDS for n in ranks for size in SIZES]
    return fit_link(rows, name="a link")


def test_by_hand() -> None:
    """Two ranks at 2 GB/s and 50 us, as in the module's docstring."""
    link = fit_of(InnerLinkSpec(bandwidth=2e9, latency=50e-6), ranks=(2,)).link
    assert link.bandwidth * link.efficiency == pytest.approx(2e9)
    assert (link.latency, link.start) == pytest.approx((50e-6, 0.0), abs=1e-9)
    assert measured("all_gather", 2, 8_000_000, link)["seconds"] == pytest.approx(2.05e-3)
    assert measured("all_reduce", 2, 8_000_000, link)["seconds"] == pytest.approx(4.1e-3)


@given(st.floats(1e8, 1e12), st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3), st.floats(0.2, 5))
def test_what_was_put_in_is_found(
    bandwidth: float, latency: float, start: float, reducing: float
) -> None:
    truth = InnerLinkSpec(bandwidth=bandwidth, latency=latency, start=start, all_reduce=reducing)
    fit = fit_of(truth)
    assert fit.error < 1e-3
    assert fit.link.bandwidth * fit.link.efficiency == pytest.approx(bandwidth, rel=1e-2)
    assert 0 < fit.link.efficiency <= 1
    for kind in KINDS:
        for size in SIZES:
            told, found = (measured(kind, 8, size, link)["seconds"] for link in (truth, fit.link))
            assert found == pytest.approx(told, rel=1e-2)


def test_the_fit_is_of_the_way_in_which_runs_send() -> None:
    fast, slow = InnerLinkSpec(bandwidth=1e10), InnerLinkSpec(bandwidth=1e9)
    shared = measured("all_reduce", 2, 2**20, fast)
    rows = [shared, *({**measured(kind, 2, 2**20, slow), "transport": "gloo"}  # type: ignore[misc]
                      for kind in ("all_reduce", "broadcast"))]  # fmt: skip
    assert training_rows(rows) == [shared, rows[2]]


def test_messages_between_two_ranks_count_where_they_go_the_same_way() -> None:
    link = InnerLinkSpec(bandwidth=1e9)
    rows = [measured("all_reduce", 2, 2**20, link), measured("broadcast", 2, 2**20, link)]
    rows[1]["kind"] = "sendrecv"
    assert training_rows(rows) == rows
    rows[1]["transport"] = "gloo"
    assert training_rows(rows) == rows[:1]


def test_one_size_tells_no_latency_and_the_link_is_still_valid() -> None:
    link = fit_link([measured("all_reduce", 2, 2**20, InnerLinkSpec(bandwidth=1e9))], name="x").link
    assert link.bandwidth == pytest.approx(1e9)
