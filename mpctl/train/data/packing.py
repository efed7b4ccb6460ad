"""Rows of seq_length tokens made of conversations: the same for the same lengths and seed, under every layout.

Best fit decreasing: conversations by falling length, each into the fullest row that still has room for it, equal ones
in an order that the seed draws. Wrapped: in that order end to end, cut where a row ends. A row is a list of pieces
(document, start, length, counted): tokens [start, start + length) of a conversation, `counted` of which the loss
counts as the next token of another one in the piece. By hand, lengths 5, 2, 3, 1 in rows of 8: best fit [5, 3],
[2, 1].
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpctl.spec.chat import Overflow, Packing

Lengths = NDArray[np.int64]
Part = tuple[int, int, int]
"""A document, the first of its tokens, and how many."""
Piece = tuple[int, int, int, int]
COLUMNS = 4  # of a piece


@dataclass(frozen=True)
class Packed:
    """rows: int32 [pieces, 4] each. too_long: conversations longer than a row, which are cut or left out; unused:
    conversations and pieces of some that are left out since the loss counts none of their tokens."""

    rows: list[NDArray[np.int32]]
    too_long: int
    unused: int


def pack(
    lengths: Lengths,
    counted: Callable[[int, int, int], int],
    *,
    seq_length: int,
    packing: Packing,
    overflow: Overflow,
    seed: int,
) -> Packed:
    """Rows of conversations of these lengths. counted: of a document and a range of its tokens, how many the loss
    counts."""
    order = np.argsort(
        np.random.Philox(key=np.array([seed, 2**64 - 1], np.uint64)).random_raw(len(lengths)), kind="stable"
    )
    too_long = int((lengths > seq_length).sum())

    def piece(document: int, start: int, length: int) -> Piece:
        return document, start, length, counted(document, start + 1, start + length)

    if packing == "wrapped":
        rows = [[piece(*one) for one in row] for row in wrapped(order.tolist(), lengths.tolist(), seq_length)]
        full = [row for row in rows if any(one[3] for one in row)]
        return Packed(_arrays(full), too_long, sum(len(row) for row in rows) - sum(len(row) for row in full))
    found = [piece(*one) for one in cut(order.tolist(), lengths.tolist(), seq_length, overflow)]
    used = [one for one in found if one[3]]
    if packing == "best-fit":
        rows = [[used[i] for i in row] for row in best_fit([one[2] for one in used], seq_length)]
    else:
        rows = [[one] for one in sorted(used)]
    return Packed(_arrays(rows), too_long, len(found) - len(used))


def _arrays(rows: Iterable[Sequence[Piece]]) -> list[NDArray[np.int32]]:
    return [np.array(row, np.int32) for row in rows]


def cut(
    order: Sequence[int], lengths: Sequence[int], seq_length: int, overflow: Overflow
) -> list[tuple[int, int, int]]:
    """The parts of documents, of at most seq_length tokens each."""
    pieces = []
    for document in order:
        length = lengths[document]
        if length > seq_length and overflow in ("drop", "refuse"):
            continue
        stop = min(length, seq_length) if overflow == "truncate" else length
        starts = range(0, stop, seq_length)
        pieces += [(document, start, min(seq_length, stop - start)) for start in starts]
    return pieces


def wrapped(order: Sequence[int], lengths: Sequence[int], seq_length: int) -> list[list[Part]]:
    """Rows of (document, start, length), end to end.

    >>> wrapped([0, 1], [5, 2], 4)
    [[(0, 0, 4)], [(0, 4, 1), (1, 0, 2)]]
    """
    rows: list[list[Part]] = []
    room = 0
    for document in order:
        start = 0
        while start < lengths[document]:
            if not room:
                rows.append([])
                room = seq_length
            length = min(room, lengths[document] - start)
            rows[-1].append((document, start, length))
            start, room = start + length, room - length
    return rows


def best_fit(lengths: Sequence[int], seq_length: int) -> list[list[int]]:
    """Rows of indices: by falling length, each into the row with the least room that holds it.

    >>> best_fit([5, 2, 3, 1], 8)
    [[0, 2], [1, 3]]
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by the tokens that they have room for
    rooms: list[int] = []  # the keys of it, sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(rooms, lengths[i])
        if place == len(rooms):
            row, room = len(rows), seq_length
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        rows[row].append(i)
        room -= lengths[i]
        if not room:
            continue
        if room not in with_room:
            with_room[room] = []
            insort(rooms, room)
        with_room[room].append(row)
    return rows
