"""Collectives through memory that the ranks of a host share (shared.py): K slots of S bytes a rank.

A message is cut into chunks that fit a slot. Chunks are numbered, the same on all ranks because all
start the same collectives in the same order. Chunk n uses slot n % K in the row of every rank:

    post     copy own part into own slot, then posted = n + 1     once done > n - K on all ranks
    finish   combine from all rows, then done = n + 1             once posted > n on all ranks

A rank posts when it starts a collective, as long as slots are free, and whenever it waits; it
finishes in order, so a wait also finishes the collectives that were started before. Neither step
blocks: a waiting rank serves its peers, so any order of waits terminates.

Of an all-to-all of unequal parts a rank knows only what it sends and receives itself. Each rank's
first chunk therefore begins with a header: how many chunks it needs and how many elements it sends
to each rank. The message has as many chunks as the rank that needs most; messages started behind it
are cut into chunks once that is known. By hand, t=2, S=4 elements: rank 0 sends 1 row of 4 to
itself and 2 to rank 1, three chunks; rank 1 sends nothing, but comes to all three.

All ranks sum in rank order, so results are the same bits everywhere and in every run. For that each
reads t rows of N bytes, t^2 N in total, where a ring moves 2 (t-1) N. That is little more at t=2,
and worth it with the few ranks of a host, whose rows are in a shared cache, since there is one
exchange instead of two. 16-bit sums are rounded at every addition, as gloo's are.

Letters: t ranks, n elements of the message, S elements of a slot.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mpctl.core.collectives import Kind
from mpctl.train.transport.shared import Segment

Reduction = Literal["sum", "max"]
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")
OPERATIONS = (*KINDS, "all_to_all of rows")  # what ranks must agree on, by its number
HEADER_ALIGNMENT = 16  # bytes: a multiple of every dtype's elements

# Seconds of waiting after which a rank yields its core, sleeps, and checks its peers: ranks may
# outnumber cores, and a long wait may well last a sixteenth longer.
YIELD, SLEEP, LOOK = 20e-6, 200e-6, 10e-3
SLEEP_SHARE, LONGEST_SLEEP = 1 / 16, 2e-3


class PeerLost(ConnectionError):
    """A peer has ended or does not come to a collective."""

    is_secondary = True


@dataclass(frozen=True)
class Operation:
    """A pending collective; it is done when all chunks of its message are finished."""

    exchange: Exchange
    message: _Message

    def wait(self) -> None:
        """Return when the result is there; raises as `Exchange.finish`."""
        self.exchange.finish(self.message)


@dataclass(slots=True, eq=False)
class _Message:
    """A rank's work on a collective's message.

    put: copies this rank's data of a slice of elements into its slot [S]. take: combines the slice
    from the slots of all ranks [t, S], once all have posted. elements, width: length of the message
    and of a chunk. parts: of an all-to-all of rows, which may turn out longer. end: number of the
    chunk behind its last, None while that is not known.
    """

    kind: str
    put: Callable[[Tensor, slice], None]
    take: Callable[[Tensor, slice], None]
    dtype: torch.dtype
    number: int
    axis: str
    elements: int
    width: int
    parts: _UnequalParts | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class _Chunk:
    message: _Message
    cut: slice

    @property
    def signature(self) -> int:
        """Kind and bytes as one number, which all ranks must agree on; the bytes are those of the
        chunk, or of one of the rows of which each rank has its own number."""
        message, parts = self.message, self.message.parts
        elements = _length(self.cut) if parts is None else parts.row
        return elements * message.dtype.itemsize * len(OPERATIONS) + OPERATIONS.index(message.kind)

    def __str__(self) -> str:
        message = self.message
        return f"{message.axis} operation {message.number} ({_described(self.signature)})"


class _UnequalParts:
    """One rank's side of an all-to-all of unequal parts, which lie one behind the other.

    sent, result: in one dimension. row: elements of a row. send, receive: elements to and from each
    rank. width: elements that a slot holds behind its header of t + 1 integers of 64 bits.
    """

    def __init__(
        self, rank: int, sent: Tensor, result: Tensor, rows: tuple[int, Sequence[int], Sequence[int]], slot_bytes: int
    ) -> None:
        self.rank, self.sent, self.result = rank, sent, result
        self.row, send, receive = rows
        self.send, self.receive = ([self.row * n for n in part] for part in (send, receive))
        header = -(-8 * (len(send) + 1) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
        self.header, self.width = (n // sent.itemsize for n in (header, slot_bytes - header))
        self.chunks = max(1, -(-len(sent) // self.width))
        self.first: list[int] = []  # where this rank's part begins in what each rank sends

    def put(self, slot: Tensor, cut: slice) -> None:
        """Copy the parts for others that lie in the slice, the first time behind the header."""
        if cut.start == 0:
            header = torch.tensor([self.chunks, *self.send])
            slot.view(torch.int64)[: len(header)].copy_(header)
        own = sum(self.send[: self.rank])
        for begin, end in ((0, own), (own + self.send[self.rank], len(self.sent))):
            part = slice(max(begin, cut.start), min(end, cut.stop))
            if part.start < part.stop:
                place = self.header + part.start - cut.start
                slot[place : place + _length(part)].copy_(self.sent[part])

    def take(self, rows: Tensor, cut: slice) -> None:
        """Copy what the others have posted for this rank, the first time its own part too."""
        place = 0
        for peer, (first, count) in enumerate(zip(self.first, self.receive, strict=True)):
            if peer == self.rank:
                begin, end = (first, first + count) if cut.start == 0 else (0, 0)
                source = self.sent[begin:end]
            else:
                begin, end = max(first, cut.start), min(first + count, cut.stop)
                source = rows[peer, self.header + begin - cut.start : self.header + end - cut.start]
            if begin < end:
                at = place + begin - first
                self.result[at : at + end - begin].copy_(source)
            place += count

    def read_headers(self, rows: Tensor) -> Iterator[tuple[int, int, int]]:
        """Read the headers of all ranks [t, S]. Yields (rank, rows sent, rows expected) of each
        whose counts differ from what this rank expects."""
        headers = rows.view(torch.int64)[:, : len(self.send) + 1].tolist()
        self.chunks = max(chunks for chunks, *_ in headers)
        self.first = [sum(sent[: self.rank]) for _, *sent in headers]
        for peer, (_, *sent) in enumerate(headers):
            if sent[self.rank] != self.receive[peer]:
                row = max(self.row, 1)
                yield peer, sent[self.rank] // row, self.receive[peer] // row


def _described(signature: int) -> str:
    size, kind = divmod(signature, len(OPERATIONS))
    return f"{OPERATIONS[kind]} of {size} bytes"


class Exchange:
    """The collectives of one group through shared memory; not safe for several threads at once.

    timeout: seconds that this rank waits for a living peer.
    """

    def __init__(self, segment: Segment, *, timeout: float) -> None:
        self.segment, self.timeout = segment, timeout
        self.ranks, self.rank = segment.ranks, segment.rank
        self._slots = segment.data.shape[1]
        self._rows: dict[torch.dtype, Sequence[Tensor]] = {}
        self._posted_at = [segment.line(rank) for rank in range(len(self.ranks))]
        self._done_at = [segment.line(rank, second=True) for rank in range(len(self.ranks))]
        self._queue: deque[_Chunk] = deque()  # not finished, oldest first
        self._uncounted: _Message | None = None  # in the queue, perhaps not with all of its chunks
        self._held: deque[_Message] = deque()  # started behind it
        self._started = self._posted = self._finished = self._operations = 0

    def all_reduce(self, tensor: Tensor, op: Reduction, axis: str) -> Operation:
        """Sum or maximum over the ranks, in place."""
        flat = _flat(tensor)

        def put(slot: Tensor, cut: slice) -> None:
            slot[: _length(cut)].copy_(flat[cut])

        def take(rows: Tensor, cut: slice) -> None:
            _combine(rows[:, : _length(cut)].unbind(), op, flat[cut])

        return self._start("all_reduce", put, take, flat, len(flat), axis)

    def all_gather(self, blocks: Tensor, piece: Tensor, axis: str) -> Operation:
        """The pieces [..] of all ranks -> blocks [t, ..]."""
        flat, gathered = _flat(piece), self._by_rank(blocks)

        def put(slot: Tensor, cut: slice) -> None:
            slot[: _length(cut)].copy_(flat[cut])

        def take(rows: Tensor, cut: slice) -> None:
            gathered[:, cut].copy_(rows[:, : _length(cut)])

        return self._start("all_gather", put, take, flat, len(flat), axis)

    def reduce_scatter(self, own: Tensor, blocks: Tensor, axis: str) -> Operation:
        """The sum over the ranks of their blocks [t, ..]; rank r receives block r in `own` [..],
        which may be a view of that block. A rank's addend of its own block is not sent."""
        result, every, rank = _flat(own), self._by_rank(blocks), self.rank
        is_overwritten = rank > 1 and every[rank].data_ptr() == result.data_ptr()

        def take(rows: Tensor, cut: slice) -> None:
            parts = list(_for_rank(rows, rank, cut).unbind())
            parts[rank] = every[rank, cut].clone() if is_overwritten else every[rank, cut]
            _combine(parts, "sum", result[cut])

        put = self._put_for_others(every)
        return self._start("reduce_scatter", put, take, blocks, len(result), axis)

    def all_to_all(self, received: Tensor, blocks: Tensor, axis: str) -> Operation:
        """Block `rank` of the blocks [t, ..] of every rank -> received [t, ..], in rank order. A
        rank's block for itself is not sent."""
        every, result, rank = self._by_rank(blocks), self._by_rank(received), self.rank

        def take(rows: Tensor, cut: slice) -> None:
            sent = _for_rank(rows, rank, cut)
            for others in (slice(rank), slice(rank + 1, None)):
                result[others, cut].copy_(sent[others])
            result[rank, cut].copy_(every[rank, cut])

        put = self._put_for_others(every)
        return self._start("all_to_all", put, take, blocks, every.shape[1], axis)

    def all_to_all_rows(
        self, received: Tensor, rows: Tensor, send: Sequence[int], receive: Sequence[int], axis: str
    ) -> Operation:
        """The next send[r] rows of every rank to rank r -> received, receive[r] rows from rank r,
        in rank order. A rank's rows for itself are not sent."""
        flat, result = _flat(rows), _flat(received)
        of_rows = (math.prod(rows.shape[1:]), send, receive)
        parts = _UnequalParts(self.rank, flat, result, of_rows, self.segment.data.shape[2])
        elements = parts.chunks * parts.width
        return self._enqueue(
            _Message(
                "all_to_all of rows",
                parts.put,
                parts.take,
                flat.dtype,
                self._next_number(),
                axis,
                elements,
                parts.width,
                parts,
            )
        )

    def broadcast(self, tensor: Tensor, source: int, axis: str) -> Operation:
        """The tensor of group rank `source`, in place."""
        flat = _flat(tensor)

        def put(slot: Tensor, cut: slice) -> None:
            if self.rank == source:
                slot[: _length(cut)].copy_(flat[cut])

        def take(rows: Tensor, cut: slice) -> None:
            if self.rank != source:
                flat[cut].copy_(rows[source, : _length(cut)])

        return self._start("broadcast", put, take, flat, len(flat), axis)

    def reduce(self, tensor: Tensor, target: int, axis: str) -> Operation:
        """The sum over the ranks, in place, on group rank `target` alone."""
        flat = _flat(tensor)

        def put(slot: Tensor, cut: slice) -> None:
            if self.rank != target:
                slot[: _length(cut)].copy_(flat[cut])

        def take(rows: Tensor, cut: slice) -> None:
            if self.rank == target:
                parts = list(rows[:, : _length(cut)].unbind())
                parts[target] = flat[cut]
                total = torch.empty_like(flat[cut])
                _combine(parts, "sum", total)
                flat[cut].copy_(total)

        return self._start("reduce", put, take, flat, len(flat), axis)

    def finish(self, message: _Message) -> None:
        """Wait until a message, and so all before it, has been combined.

        Raises PeerLost where a peer's process has ended and after `timeout` seconds without
        progress, and RuntimeError where a peer started another collective.
        """
        began = 0.0
        while message.end is None or self._finished < message.end:
            posted = self._post()
            if self._combine() or posted:
                began = 0.0
            elif began:
                self._pause(time.monotonic() - began)
            else:
                began = time.monotonic()

    def _by_rank(self, blocks: Tensor) -> Tensor:
        return _flat(blocks).view(len(self.ranks), -1)

    def _put_for_others(self, blocks: Tensor) -> Callable[[Tensor, slice], None]:
        """A function that copies a slice of all blocks [t, n] but this rank's into a slot [S]."""

        def put(slot: Tensor, cut: slice) -> None:
            sent = slot[: len(blocks) * _length(cut)].view(len(blocks), -1)
            for others in (slice(self.rank), slice(self.rank + 1, None)):
                sent[others].copy_(blocks[others, cut])

        return put

    def _start(
        self,
        kind: str,
        put: Callable[[Tensor, slice], None],
        take: Callable[[Tensor, slice], None],
        sent: Tensor,
        elements: int,
        axis: str,
    ) -> Operation:
        """Cut a message into chunks and post those that have room.

        sent: the tensor that goes into this rank's slots; elements: the length of the message.
        """
        width = self.segment.data.shape[2] // sent.dtype.itemsize
        if sent.numel() > elements:
            width //= len(self.ranks)
        number = self._next_number()
        message = _Message(kind, put, take, sent.dtype, number, axis, elements, width)
        return self._enqueue(message)

    def _next_number(self) -> int:
        self._operations += 1
        return self._operations

    def _enqueue(self, message: _Message) -> Operation:
        self._held.append(message)
        self._cut_held()
        while self._post():
            pass
        return Operation(self, message)

    def _cut_held(self) -> None:
        """Cut messages into chunks, up to one that may turn out longer than this rank knows."""
        while self._held and self._uncounted is None:
            message = self._held.popleft()
            self._cut(message, 0)
            if message.parts is None:
                message.end = self._started
            else:
                self._uncounted = message

    def _cut(self, message: _Message, begin: int) -> None:
        for start in range(begin, message.elements, message.width):
            stop = min(start + message.width, message.elements)
            self._queue.append(_Chunk(message, slice(start, stop)))
            self._started += 1

    def _count(self, first: _Chunk, parts: _UnequalParts, rows: Tensor) -> None:
        """All ranks have posted the first chunk of a message: it has as many chunks as any of them
        needs. Raises RuntimeError where a rank sends another number of rows than this one expects.
        """
        for peer, sent, expected in parts.read_headers(rows):
            raise RuntimeError(
                f"{first}: rank {self.ranks[peer]} sends {sent} rows, rank {self.ranks[self.rank]} "
                f"expects {expected}; ranks must exchange their counts beforehand"
            )
        message = first.message
        known, message.elements = message.elements, parts.chunks * parts.width
        self._cut(message, known)
        message.end, self._uncounted = self._started, None
        self._cut_held()

    def _post(self) -> bool:
        """Post the next chunk, if there is one and all ranks have read its slot."""
        if self._posted == self._started:
            return False
        if self._least(self._done_at) <= self._posted - self._slots:
            return False
        chunk, slot = self._queue[self._posted - self._finished], self._posted % self._slots
        chunk.message.put(self._at(chunk.message.dtype, slot)[self.rank], chunk.cut)
        own = self._posted_at[self.rank]
        self.segment.flags[own + 1 + slot] = chunk.signature
        self._posted += 1
        self.segment.flags[own] = self._posted  # last: peers read the slot once they see it
        return True

    def _combine(self) -> bool:
        """Finish the oldest chunk, if all have posted it."""
        if self._finished == self._posted or self._least(self._posted_at) <= self._finished:
            return False
        chunk, slot = self._queue[0], self._finished % self._slots
        self._check(chunk, slot)
        rows = self._at(chunk.message.dtype, slot)
        if chunk.message is self._uncounted and chunk.message.parts is not None:
            self._count(chunk, chunk.message.parts, rows)
        chunk.message.take(rows, chunk.cut)
        self._queue.popleft()
        self._finished += 1
        self.segment.flags[self._done_at[self.rank]] = self._finished
        return True

    def _least(self, flags: list[int]) -> int:
        return min(map(self.segment.flags.__getitem__, flags))

    def _at(self, dtype: torch.dtype, slot: int) -> Tensor:
        """[t, S] of a slot, in elements of a dtype."""
        if dtype not in self._rows:
            self._rows[dtype] = self.segment.data.view(dtype).unbind(1)
        return self._rows[dtype][slot]

    def _check(self, chunk: _Chunk, slot: int) -> None:
        """Raise RuntimeError if a peer posted another collective: its bytes would be misread."""
        ours = chunk.signature
        for rank, posted in zip(self.ranks, self._posted_at, strict=True):
            theirs = self.segment.flags[posted + 1 + slot]
            if theirs != ours:
                raise RuntimeError(
                    f"{chunk}: rank {rank} came with {_described(theirs)}; all ranks of a group "
                    "must start the same collectives in the same order"
                )

    def _pause(self, waited: float) -> None:
        """Spin, yield or sleep; raises PeerLost when a peer has ended or the timeout is over."""
        if waited < YIELD:
            return
        if waited < SLEEP:
            os.sched_yield()
            return
        if waited > LOOK:
            self._look(waited)
        time.sleep(min(waited * SLEEP_SHARE, LONGEST_SLEEP))

    def _look(self, waited: float) -> None:
        ended = self.segment.lost()  # before the flags: what a peer posted before its end counts
        missing = {  # a peer that still occupies our slot has not posted this chunk either
            peer
            for peer, flag in enumerate(self._posted_at)
            if peer != self.rank and self.segment.flags[flag] <= self._finished
        }
        where = self._queue[0]
        if ended & missing:
            raise PeerLost(f"{where}: connection closed by peer: {self._named(ended & missing)} ended")
        if missing and waited > self.timeout:
            raise PeerLost(
                f"{where}: timed out after {self.timeout:g} s of waiting for "
                f"{self._named(missing)} (launch.timeout_seconds sets the limit)"
            )

    def _named(self, peers: set[int]) -> str:
        ranks = [str(self.ranks[peer]) for peer in sorted(peers)]
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def _flat(tensor: Tensor) -> Tensor:
    """The tensor in one dimension, detached: the autograd graph must not reach into the slots."""
    return tensor.detach().view(-1)


def _length(cut: slice) -> int:
    return int(cut.stop - cut.start)


def _for_rank(rows: Tensor, rank: int, cut: slice) -> Tensor:
    """The data for rank `rank` in the slots of all ranks [t, S] -> [t, n]."""
    n = _length(cut)
    return rows[:, rank * n : (rank + 1) * n]


def _combine(rows: Sequence[Tensor], op: Reduction, out: Tensor) -> None:
    """Combine the rows into `out` in rank order; `out` may share memory with the first two only."""
    combine: Callable[..., Tensor] = torch.add if op == "sum" else torch.maximum
    combine(rows[0], rows[1], out=out)
    for row in rows[2:]:
        combine(out, row, out=out)
