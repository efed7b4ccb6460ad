"""What each kind of collective sends, against messages passed by hand; unknown kinds are errors."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.collectives import COLLECTIVES, Kind, bus_factor, get_collective, sent_by_rank
from mpctl.plan.estimate.network import Route
from mpctl.plan.planning.traffic import sent_to
from mpctl.records.rundir import collective_log, requests
from mpctl.train.transport import exchange

ROUTE = Route(4, 1, 1e-9, 0.0, 1e-6, 0.0)


@given(message=st.integers(0, 2**40), ranks=st.integers(1, 1024))
def test_sent_bytes_are_exact(message: int, ranks: int) -> None:
    exact = Fraction(2 * (ranks - 1) * message, ranks)
    sent = sent_by_rank("all_reduce", message, ranks)
    assert isinstance(sent, int) == (exact.denominator == 1)
    assert sent == (exact if isinstance(sent, int) else pytest.approx(float(exact), rel=1e-12))


@given(ranks=st.integers(1, 9), chunk=st.integers(1, 5))
def test_an_all_reduce_sends_what_a_ring_sends(ranks: int, chunk: int) -> None:
    """A reduce-scatter and an all-gather by hand, chunk after chunk around the ring."""
    held = [[{(rank, c)} for c in range(ranks)] for rank in range(ranks)]
    sent = [0] * ranks
    for step in range(2 * (ranks - 1)):
        moving = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        copies = [(rank, c, set(held[rank][c])) for rank, c in moving]
        for rank, c, terms in copies:
            held[(rank + 1) % ranks][c] |= terms
            sent[rank] += chunk
    whole = [{(rank, c) for rank in range(ranks)} for c in range(ranks)]
    assert all(own == whole for own in held)
    assert sent == [sent_by_rank("all_reduce", chunk * ranks, ranks)] * ranks


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_what_a_rank_sends_goes_to_ranks_of_its_group(kind: str) -> None:
    """3 ranks, 600 bytes: the parts that go to other ranks are all that the rank sends."""
    parts = list(sent_to(kind, 600, [2, 5, 8], 5))
    assert sum(size for _, size in parts) == sent_by_rank(kind, 600, 3)
    receivers = [2, 8] if kind == "all_to_all" else [8]
    assert [receiver for receiver, _ in parts] == receivers


def test_every_kind_has_a_row_and_no_list_has_others() -> None:
    kinds = set(get_args(Kind))
    assert set(COLLECTIVES) == kinds
    assert set(collective_log.KINDS) - {""} == kinds - {"sendrecv"}
    assert set(exchange.KINDS) <= kinds
    assert set(get_args(requests.CollectiveKind)) == kinds - {"send"}


@pytest.mark.parametrize(
    "use",
    [
        get_collective,
        lambda kind: sent_by_rank(kind, 8, 2),
        lambda kind: bus_factor(kind, 2),
        lambda kind: ROUTE.collective(kind, 8),
        lambda kind: Route(1, 1, 0.0, 0.0, 0.0, 0.0).collective(kind, 8),
        lambda kind: list(sent_to(kind, 8, [0, 1], 0)),
    ],
)
def test_an_unknown_kind_is_an_error_everywhere(use: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match=r"no collective is called .al_reduce..*all_to_all"):
        use("al_reduce")


@pytest.mark.parametrize("kind", ["send", "sendrecv"])
def test_a_message_between_two_ranks_is_no_collective(kind: str) -> None:
    with pytest.raises(ValueError, match="one rank to another"):
        ROUTE.collective(kind, 8)
