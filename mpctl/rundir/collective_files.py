"""What `mpctl bench collectives` and its ranks exchange: which collectives to time, and the times.

Sizes are those of nccl-tests (doc/PERFORMANCE.md): `bytes` is the whole message, over all ranks for
a gather, a scatter and an all-to-all; `count` the elements that its call names, which are a rank's
part for these three. By hand, 4 ranks and 1024 bytes of float32: an all-reduce of 256 elements, an
all-gather of 64 elements from each rank.
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv"
]
Transport = Literal["gloo", "nccl", "shared"]
CollectiveOp = Literal["sum", "max", "none"]

SPLIT = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
"""Kinds whose message is a block for each rank of the group."""
ADDING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
"""Kinds that add up."""


class CollectiveCase(TypedDict):
    """A collective to be timed in all groups of an axis at once. axis: the group's name in plans;
    dtype: as torch calls it, "float32"; op: "none" where nothing is added up."""

    kind: CollectiveKind
    axis: str
    transport: Transport
    dtype: str
    op: CollectiveOp
    bytes: int
    count: int


class CollectivesRequest(TypedDict):
    """Time every case in `rounds` of all cases: `warm_up` calls, then `iterations` that count.

    root: the rank of the group that broadcasts and gets a reduction. seconds: begin no round that
    would end later than this after the first began, None for no limit. check: compare the result
    with the right one in every round.
    """

    task: Literal["collectives"]
    cases: list[CollectiveCase]
    rounds: int
    iterations: int
    warm_up: int
    root: int
    check: bool
    seconds: float | None


class CollectiveRound(TypedDict):
    """One round of a case: the mean seconds of a call on the slowest rank, and how many elements of
    all ranks differ from the right result, -1 where they were not compared."""

    event: Literal["timing"]
    case: int
    round: int
    seconds: float
    wrong: int


class AbsentTransport(TypedDict):
    """Groups of an axis have no such way to send on some rank, so that its cases are left out."""

    event: Literal["absent"]
    axis: str
    transport: Transport


CollectiveAnswer = CollectiveRound | AbsentTransport
