"""Collectives between ranks of one host through memory that all of them have mapped.

The first rank makes the memory with memfd_create, a file without a name, and the others open it
where that rank holds it, /proc/PID/fd/N; it closes it once all have. So whoever is killed, and
when, no file is left behind, and the size of /dev/shm (64 MiB in many containers) is no bound.
Pages are taken at once: touching one that cannot be had would be a SIGBUS in the middle of a step.
Whether it worked is summed over the group, so that all ranks use the memory or none does.

Layout, t ranks, K slots of S bytes: two lines of 128 bytes a rank, so that no two ranks write to
one cache line nor to a pair that is prefetched together; from the next page on t x K x S bytes.
By hand, t=2, K=4, S=1 MiB: 512 bytes of flags, data from byte 4096 on, 8 MiB and a page in all.

A message is cut into chunks that fit a slot. Chunks are numbered, the same on all ranks because all
start the same collectives in the same order. Chunk n uses slot n % K in the row of every rank:

    post     copy own part into own slot, then posted = n + 1     once done > n - K on all ranks
    finish   combine from all rows, then done = n + 1             once posted > n on all ranks

A rank posts when it starts a collective, as far as slots are free, and whenever it waits; it
finishes in order, so a wait also finishes what was started before, and has arrived before. Neither
step waits for anyone: who waits serves its peers, and any order of waits comes to an end.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.transport.messages import (
    KINDS,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    CollectiveSteps,
    Reduce,
    ReduceScatter,
    Reduction,
    length,
)

SLOTS, SLOT_BYTES = 4, 2**20
LINE = 16  # flags of 8 bytes in a line
Reserve = Callable[[int, int], None]


class NoSegment(OSError):
    """The ranks of this group share no memory; raised on all of them alike."""


@dataclass(frozen=True)
class Segment:
    """The memory that rank `rank` of a group has mapped; `ranks` are the group's global ranks.

    flags: 64-bit; a rank writes those from `line(rank)` on, two lines of them, and no others.
    data: [t, K, S] bytes. processes: the group rank of each peer, by a handle on its process.
    ended: polls those handles, which become readable when the process has ended.
    """

    rank: int
    ranks: tuple[int, ...]
    flags: memoryview
    data: Tensor
    processes: dict[int, int]
    ended: select.poll

    def line(self, rank: int, second: bool = False) -> int:
        """Index in `flags` of the first, or second, line of a rank."""
        return (2 * rank + second) * LINE

    def lost(self) -> set[int]:
        """Group ranks whose process has ended: the kernel says so, before any timeout is over."""
        return {self.processes[handle] for handle, _ in self.ended.poll(0)}


def open_segment(
    rank: int,
    ranks: Sequence[int],
    process_group: dist.ProcessGroup | None,
    *,
    slots: int = SLOTS,
    slot_bytes: int = SLOT_BYTES,
    reserve: Reserve | None = None,
) -> Segment:
    """Map memory that the ranks of a group share; every rank of the group calls this.

    rank: in the group; ranks: the group's global ranks; process_group: torch's, over which they
    agree, None for the default one. slots, slot_bytes: K and S. reserve: allocates so many bytes of
    a file, or raises OSError (posix_fallocate by default). Raises NoSegment on all ranks when one
    of them cannot map it.
    """
    assert slots < LINE and slot_bytes % 16 == 0, "a flag a slot; whole elements of any dtype"
    shape = (len(ranks), slots, slot_bytes)
    message = torch.zeros(len(ranks) + 2, dtype=torch.int64)  # process ids, file, its name
    message[rank] = os.getpid()
    file, why = -1, ""
    if rank == 0:
        try:
            file, message[-1] = _make(_start(shape) + _bytes(shape), reserve or _reserve)
            message[-2] = file
        except OSError as error:
            why = str(error)
    try:
        dist.all_reduce(message, group=process_group)
        segment, failed = _attempt(rank, tuple(ranks), message.tolist(), shape)
        good = torch.tensor(int(segment is not None))
        dist.all_reduce(good, group=process_group)
    finally:
        if file >= 0:
            os.close(file)
    if segment is None or int(good) < len(ranks):
        raise NoSegment(why or failed or "another rank of the group could not map it")
    return segment


def _start(shape: tuple[int, int, int]) -> int:
    """Byte at which data begin: that of the page after the flags."""
    return -(-shape[0] * 2 * LINE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


def _bytes(shape: tuple[int, int, int]) -> int:
    return shape[0] * shape[1] * shape[2]


def _name(number: int) -> str:
    return f"mpctl-{number:016x}"


def _make(size: int, reserve: Reserve) -> tuple[int, int]:
    """A file of `size` bytes in memory, and the random number in its name."""
    _check_machine()
    number = secrets.randbits(62) + 1
    file = os.memfd_create(_name(number))
    try:
        os.fchmod(file, 0o600)
        reserve(file, size)
    except OSError:
        os.close(file)
        raise
    return file, number


def _reserve(file: int, size: int) -> None:
    os.posix_fallocate(file, 0, size)


def _check_machine() -> None:
    """A flag written after the data must be seen after them: x86 keeps the order of stores and of
    loads (TSO); elsewhere that takes fences, which Python does not have."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"needs Linux on x86-64, this is {sys.platform} on {platform.machine()}")


def _attempt(
    rank: int, ranks: tuple[int, ...], message: list[int], shape: tuple[int, int, int]
) -> tuple[Segment | None, str]:
    *pids, file, number = message
    try:
        if not number:
            return None, "the first rank of the group could not make it"
        memory = _map(f"/proc/{pids[0]}/fd/{file}", _name(number), _start(shape) + _bytes(shape))
        processes, ended = _watch(pids, rank)
    except OSError as error:
        return None, str(error)
    flags = memoryview(memory)[: _start(shape)].cast("q")
    data = torch.frombuffer(memory, dtype=torch.uint8, offset=_start(shape)).view(shape)
    return Segment(rank, ranks, flags, data, processes, ended), ""


def _map(path: str, name: str, size: int) -> mmap.mmap:
    """Map the file at `path`. On another host or in another container the path may lead to
    anything, so its name is checked before it is opened."""
    _check_machine()
    target = str(Path(path).readlink())
    if target != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is {target}, not {name}: not the same host?")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _watch(pids: list[int], rank: int) -> tuple[dict[int, int], select.poll]:
    """A handle on each peer's process, readable once it has ended, even if not yet reaped."""
    peers = [peer for peer in range(len(pids)) if peer != rank]
    processes = {os.pidfd_open(pids[peer]): peer for peer in peers}
    ended = select.poll()
    for handle in processes:
        ended.register(handle, select.POLLIN)
    return processes, ended


# Seconds of waiting after which a core is offered to others, left, and the peers are looked at:
# ranks may outnumber cores, and a sixteenth more of a long wait is no loss.
YIELD, SLEEP, LOOK = 20e-6, 200e-6, 10e-3
SLEEP_SHARE, LONGEST_SLEEP = 1 / 16, 2e-3


class PeerLost(ConnectionError):
    """A peer has ended or does not come to a collective."""

    is_echo = True


@dataclass(frozen=True)
class Operation:
    """A collective under way: it is over when `chunks` chunks of the exchange are finished."""

    exchange: Exchange
    chunks: int

    def wait(self) -> None:
        """Return when the result is there; raises as `Exchange.finish`."""
        self.exchange.finish(self.chunks)


@dataclass(frozen=True, slots=True)
class _Chunk:
    message: CollectiveSteps
    cut: slice
    dtype: torch.dtype
    operation: int
    axis: str

    @property
    def signature(self) -> int:
        """Kind and bytes as one number, which all ranks must agree on."""
        kind = KINDS.index(self.message.kind)
        return length(self.cut) * self.dtype.itemsize * len(KINDS) + kind

    def __str__(self) -> str:
        return f"{self.axis} operation {self.operation} ({_described(self.signature)})"


def _described(signature: int) -> str:
    size, kind = divmod(signature, len(KINDS))
    return f"{KINDS[kind]} of {size} bytes"


class Exchange:
    """The collectives of one group through shared memory; not safe for several threads at once.

    timeout: seconds that a living peer may keep this rank waiting.
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
        return self._start(AllReduce(_flat(tensor), op), tensor, tensor.numel(), axis)

    def all_gather(self, blocks: Tensor, piece: Tensor, axis: str) -> Operation:
        """The pieces [..] of all ranks -> blocks [t, ..]."""
        message = AllGather(_flat(piece), _flat(blocks).view(len(self.ranks), -1))
        return self._start(message, piece, piece.numel(), axis)

    def reduce_scatter(self, own: Tensor, blocks: Tensor, axis: str) -> Operation:
        """The sum over the ranks of their blocks [t, ..], of which this rank gets its own [..]."""
        rows = _flat(blocks).view(len(self.ranks), -1)
        return self._start(ReduceScatter(rows, _flat(own), self.rank), blocks, own.numel(), axis)

    def all_to_all(self, received: Tensor, blocks: Tensor, axis: str) -> Operation:
        """Block `rank` of the blocks [t, ..] of every rank -> received [t, ..], in rank order."""
        rows, columns = (_flat(side).view(len(self.ranks), -1) for side in (blocks, received))
        message = AllToAll(rows, columns, self.rank)
        return self._start(message, blocks, rows.shape[1], axis)

    def broadcast(self, tensor: Tensor, source: int, axis: str) -> Operation:
        """The tensor of group rank `source`, in place."""
        message = Broadcast(_flat(tensor), self.rank, source)
        return self._start(message, tensor, tensor.numel(), axis)

    def reduce(self, tensor: Tensor, target: int, axis: str) -> Operation:
        """The sum over the ranks, in place, on group rank `target` alone."""
        message = Reduce(_flat(tensor), self.rank, target)
        return self._start(message, tensor, tensor.numel(), axis)

    def finish(self, chunks: int) -> None:
        """Wait until so many chunks since the beginning have been combined.

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

    def _start(self, message: CollectiveSteps, sent: Tensor, elements: int, axis: str) -> Operation:
        """Cut a message into chunks and post what has room.

        sent: the tensor that goes into this rank's slots; elements: the length of the message.
        """
        width = self.segment.data.shape[2] // sent.dtype.itemsize
        if sent.numel() > elements:
            width //= len(self.ranks)
        self._operations += 1
        for begin in range(0, elements, width):
            cut = slice(begin, min(begin + width, elements))
            self._queue.append(_Chunk(message, cut, sent.dtype, self._operations, axis))
            self._started += 1
        while self._post():
            pass
        return Operation(self, self._started)

    def _post(self) -> bool:
        """Post the next chunk, if there is one and all have read what was in its slot."""
        if self._posted == self._started:
            return False
        if self._least(self._done_at) <= self._posted - self._slots:
            return False
        chunk, slot = self._queue[self._posted - self._finished], self._posted % self._slots
        chunk.message.put(self._at(chunk.dtype, slot)[self.rank], chunk.cut)
        own = self._posted_at[self.rank]
        self.segment.flags[own + 1 + slot] = chunk.signature
        self._posted += 1
        self.segment.flags[own] = self._posted  # after all else: peers read once they see it
        return True

    def _combine(self) -> bool:
        """Finish the oldest chunk, if all have posted it."""
        if self._finished == self._posted or self._least(self._posted_at) <= self._finished:
            return False
        chunk, slot = self._queue[0], self._finished % self._slots
        self._check(chunk, slot)
        chunk.message.take(self._at(chunk.dtype, slot), chunk.cut)
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
        """RuntimeError where a peer posted another collective: its bytes would be read as ours."""
        ours = chunk.signature
        for rank, posted in zip(self.ranks, self._posted_at, strict=True):
            theirs = self.segment.flags[posted + 1 + slot]
            if theirs != ours:
                raise RuntimeError(
                    f"{chunk}: rank {rank} came with {_described(theirs)}; all ranks of a group "
                    "must start the same collectives in the same order"
                )

    def _pause(self, waited: float) -> None:
        """Spin, offer the core, leave it; raises when a peer has ended or the time is over."""
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
        missing = {  # who keeps our slot taken has not posted this chunk either
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
    """One dimension, outside autograd, whose graph must not grow into the slots."""
    return tensor.detach().view(-1)
