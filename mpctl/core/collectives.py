"""The kinds of messages between ranks, one row each: the bytes a rank sends, and the pattern.

A message of n bytes over t ranks is the full tensor: in an all-to-all the blocks of one rank for
all, its own included, as nccl-tests counts it; n/t is a mean where the blocks are unequal.

    kind               each rank sends         pattern
    all_reduce         2 (t-1)/t n             around a ring, twice
    all_gather         (t-1)/t n               around a ring
    reduce_scatter     (t-1)/t n               around a ring
    all_to_all         (t-1)/t n               n/t to every other rank, not around a ring
    broadcast, reduce  (t-1)/t n on average    along a chain; all of n crosses each link
    send, sendrecv     n                       to one rank

All code that counts or times messages reads these rows, and a kind without a row is an error.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send", "sendrecv"]
Pattern = Literal["ring", "peers", "chain", "pair"]


class CollectiveLaw(NamedTuple):
    """phases: how often a rank sends (t-1)/t of a message, on average; 0 where it sends the full
    message to one other rank."""

    phases: int
    pattern: Pattern


COLLECTIVES: dict[str, CollectiveLaw] = {
    "all_reduce": CollectiveLaw(2, "ring"),
    "all_gather": CollectiveLaw(1, "ring"),
    "reduce_scatter": CollectiveLaw(1, "ring"),
    "all_to_all": CollectiveLaw(1, "peers"),
    "broadcast": CollectiveLaw(1, "chain"),
    "reduce": CollectiveLaw(1, "chain"),
    "send": CollectiveLaw(0, "pair"),
    "sendrecv": CollectiveLaw(0, "pair"),
}


def get_collective(kind: str) -> CollectiveLaw:
    """The row of a kind. Raises ValueError for a name that has none."""
    if kind not in COLLECTIVES:
        raise ValueError(f"no collective is called {kind!r}: there are {', '.join(COLLECTIVES)}")
    return COLLECTIVES[kind]


def sent_by_rank(kind: str, size: int, ranks: int) -> int | float:
    """Bytes that each of the ranks sends of a message of `size` bytes, on average; an int where
    possible. Raises ValueError for an unknown kind.

    >>> [sent_by_rank(kind, 8, 4) for kind in ("all_reduce", "all_to_all", "send")]
    [12, 6, 8]
    """
    phases = get_collective(kind).phases
    return ring_bytes(phases * size, ranks) if phases else size


def ring_bytes(volume: int, ranks: int) -> int | float:
    """(t-1)/t of the bytes of all phases of some messages: the bytes that each of t ranks sends."""
    exact = (ranks - 1) * volume
    return exact // ranks if exact % ranks == 0 else exact / ranks


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes that cross the busiest link over those of the message, by which nccl-tests multiplies a
    message's bytes over its time to get busbw (doc/PERFORMANCE.md); the link bounds that whatever
    the number of ranks. Raises ValueError for an unknown kind.

    >>> [bus_factor(kind, 4) for kind in ("all_reduce", "all_gather", "broadcast", "send")]
    [1.5, 0.75, 1.0, 1.0]
    """
    phases, pattern = get_collective(kind)
    return 1.0 if pattern in ("chain", "pair") else phases * (ranks - 1) / ranks
