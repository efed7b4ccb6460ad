"""Collectives through memory that the ranks of a host share (shared.py): K slots of S bytes a rank.

A message is cut into chunks that fit a slot. Chunks are numbered, the same on all ranks because all
start the same collectives in the same order. Chunk n uses slot n % K in the row of every rank:

    post     copy own part into own slot, then posted = n + 1     once done > n - K on all ranks
    finish   combine from all rows, then done = n + 1             once posted > n on all ranks

A rank posts when it starts a collective, as long as slots are free, and whenever it waits; it
finishes in order, so a wait also finishes the collectives that were started before. Neither step
blocks: a waiting rank serves its peers, so any order of waits terminates.

All ranks sum in rank order, so results are the same bits everywhere and in every run. For that each
reads t rows of N bytes, t^2 N in total, where a ring moves 2 (t-1) N. That is little more at t=2,
and worth it with the few ranks of a host, whose rows are in a shared cache, since there is one
exchange instead of two. 16-bit sums are rounded at every addition, as gloo's are.

Letters: t ranks, n elements of the message, S elements of a slot.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mpctl.collectives import Kind
from mpctl.transport.shared import Segment

Reduction = Literal["sum", "max"]
KINDS: tuple[Kind, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"
)  # fmt: skip

# Seconds of waiting after which a rank yields its core, sleeps, and checks its peers: ranks may
# outnumber cores, and a long wait may well last a sixteenth longer.
YIELD, SLEEP, LOOK = 20e-6, 200e-6, 10e-3
SLEEP_SHARE, LONGEST_SLEEP = 1 / 16, 2e-3


class PeerLost(ConnectionError):
    """A peer has ended or does not come to a collective."""

    is_echo = True


@dataclass(frozen=True)
class Operation:
    """A pending collective; it is done when `chunks` chunks of the exchange are finished."""

    exchange: Exchange
    chunks: int

    def wait(self) -> None:
        """Return when the result is there; raises as `Exchange.finish`."""
        self.exchange.finish(self.chunks)


@dataclass(frozen=True, slots=True)
class _Message:
    """A rank's work on part of a collective's message, a slice of elements.

    put: copies this rank's data of the slice into its slot [S]. take: combines the slice from the
    slots of all ranks [t, S], once all have posted.
    """

    kind: Kind
    put: Callable[[Tensor, slice], None]
    take: Callable[[Tensor, slice], None]
    dtype: torch.dtype
    number: int
    axis: str


@dataclass(frozen=True, slots=True)
class _Chunk:
    message: _Message
    cut: slice

    @property
    def signature(self) -> int:
        """Kind and bytes as one number, which all ranks must agree on."""
        message = self.message
        return _length(self.cut) * message.dtype.itemsize * len(KINDS) + KINDS.index(message.kind)

    def __str__(self) -> str:
        message = self.message
        return f"{message.axis} operation {message.number} ({_described(self.signature)})"


def _described(signature: int) -> str:
    size, kind = divmod(signature, len(KINDS))
    return f"{KINDS[kind]} of {size} bytes"


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

    def finish(self, chunks: int) -> None:
        """Wait until `chunks` chunks, counted from the beginning, have been combined.

        Raises PeerLost where a peer's process has ended and after `timeout` seconds without
        progress, and RuntimeError where a peer started another collective.
        """
        began = 0.0
        while self._finished < chunks:
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
        kind: Kind,
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
        self._operations += 1
        message = _Message(kind, put, take, sent.dtype, self._operations, axis)
        for begin in range(0, elements, width):
            self._queue.append(_Chunk(message, slice(begin, min(begin + width, elements))))
            self._started += 1
        while self._post():
            pass
        return Operation(self, self._started)

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
        chunk.message.take(self._at(chunk.message.dtype, slot), chunk.cut)
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
        """Raises RuntimeError if a peer posted another collective, whose bytes would be misread."""
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
            raise PeerLost(
                f"{where}: connection closed by peer: {self._named(ended & missing)} ended"
            )
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
