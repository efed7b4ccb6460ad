"""A world in which messages behave as NCCL's do, over gloo, on CPU.

- A collective or a message returns at once; a thread of its communicator does it later, one after
  the other in the order in which they were started. A send ends when it is received, so that an
  unbatched send or receive holds up those behind it (torch.distributed, ProcessGroupNCCL with a
  bound device).
- `wait` does not hold up the host: the stream that the rank computes on waits. Here the host
  computes, so the next operation that touches the result waits for it; reading a number does too.
- Until then a result holds NaN, and every use of it is in no order with the message: a Race
  (order.py), which names both. So is writing what is still to be sent. Work holds its tensors until
  it is waited for, as torch's shelf does (TORCH_NCCL_AVOID_RECORD_STREAMS); a memory that goes back
  before its stream knows of all uses is an error, and so is work that nobody waits for.
- Memory that is not this rank's to read in the end is NaN: `reduce` on all ranks but the target.
- The host is a stream of its own where it computes: with pinned memory (watch.py). Refilling it
  while a copy is under way is a race, and so is a thread of the host that reads a copy without
  waiting for its mark (SavedLate, ranks.py).
- Memory is counted as allocators hand it out (order.py): `reserved`.

By hand, two ranks: `work = dist.all_reduce(x, async_op=True)` fills x with NaN and returns; `x + 1`
is a Race; after `work.wait()` it waits until the thread has the sum, and adds 1.

Tensors of other threads (a thread that writes a checkpoint, one that reads ahead) are not watched.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.train.transport.streams import SideStream
from tests.late.order import HOST, StreamOrder
from tests.late.watch import HostCalls, TensorWatch, extent_of

MAIN = "the main stream"
LATEST = 2e-3  # seconds by which a communicator is late, at most


class TooEarly(AssertionError):
    """Something is left undone, or is undone too early."""


@dataclass(eq=False)
class LateWork:
    """A message under way. words: names it; known: the communicator's clock when it is done; held:
    its tensors, until somebody waits."""

    world: LateWorld
    words: str
    known: dict[str, int]
    held: list[Tensor]
    done: threading.Event = field(default_factory=threading.Event)
    is_awaited: bool = False
    error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits."""
        self.is_awaited = True
        self.world.stream_waits(self)
        self.held = []
        return True

    def is_completed(self) -> bool:
        """Whether the result is there."""
        return self.done.is_set()

    def finish(self) -> None:
        """The host waits; raises what went wrong."""
        if not self.done.wait(self.world.patience):
            raise TimeoutError(f"{self.words} does not come to an end")
        if self.error is not None:
            raise RuntimeError(f"{self.words}: {self.error}") from self.error


@dataclass(frozen=True)
class _Part:
    """What a message reads or writes of a memory."""

    work: LateWork
    extent: tuple[int, int]
    writes: bool

    def meets(self, extent: tuple[int, int], *, writes: bool) -> bool:
        """Whether a use of these bytes has to come after the message."""
        (low, high), (first, end) = self.extent, extent
        return (self.writes or writes) and low < end and first < high


class LateWorld:
    """The streams of one rank. current: the name of the one that it computes on; awaited: by
    stream, the messages that it waits for and that are not known to be over; patience: seconds
    after which a message has failed. is_serial: all communicators share one thread, as where the
    device has no room for two messages at once (CUDA_DEVICE_MAX_CONNECTIONS=1 among other ways to
    it): what needs two at a time hangs."""

    def __init__(self, rank: int, *, patience: float = 40.0, is_serial: bool = False) -> None:
        self.rank, self.patience = rank, patience
        self.all_steps = Steps() if is_serial else None
        self.order, self.current = StreamOrder(), MAIN
        self.awaited: dict[str, list[LateWork]] = {}
        self.works: list[LateWork] = []
        self.under_way: dict[int, list[_Part]] = {}  # by memory
        self.too_early: deque[str] = deque()
        self.streams = self.groups = 0
        self.watch = TensorWatch(self)
        self.random = random.Random(rank)

    def start(self, group: LateGroup, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> LateWork:
        """Note that a message begins: its stream waits for the current one. Raises Race."""
        stream = group.stream
        order, keys = self.order, [self.watch.see(tensor) for tensor in (*reads, *writes)]
        order.wait(self.current, order.clock(HOST))
        order.wait(stream, order.clock(self.current))
        size = (*reads, *writes)[0].nbytes
        words = f"{kind} {len(self.works)} over {group.words} ({size} bytes) of {caller()}"
        work = LateWork(self, words, order.clock(stream), [*reads, *writes])
        for number, (key, tensor) in enumerate(zip(keys, work.held, strict=True)):
            part = _Part(work, extent_of(tensor), writes=number >= len(reads))
            order.use(stream, key, words, writes=part.writes, extent=part.extent)
            self.under_way.setdefault(key, []).append(part)
        work.known = dict(order.clock(stream))
        self.works.append(work)
        return work

    def stream_waits(self, work: LateWork) -> None:
        """The current stream waits for a message."""
        self.order.wait(self.current, work.known)
        self.awaited.setdefault(self.current, []).append(work)

    def unfinished(self) -> list[LateWork]:
        """The messages that the current stream waits for and that are not over."""
        left = [work for work in self.awaited.get(self.current, []) if not work.done.is_set()]
        self.awaited[self.current] = left
        return list(left)

    def use(self, tensor: Tensor, words: str, *, writes: bool) -> None:
        """The current stream uses a tensor: raises Race, or waits until it is filled."""
        key, extent = self.watch.see(tensor), extent_of(tensor)
        self.order.wait(self.current, self.order.clock(HOST))
        self.order.use(self.current, key, words, writes=writes, extent=extent)
        left = []
        for part in self.under_way.pop(key, ()):
            if part.meets(extent, writes=writes):
                part.work.finish()
            elif not part.work.done.is_set():
                left.append(part)
        if left:
            self.under_way[key] = left

    def is_host_s(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory of the host's own."""
        return self.order.memories[self.watch.see(tensor)].home == HOST

    def host_uses(self, tensor: Tensor, words: str, *, writes: bool, thread: str = HOST) -> None:
        """A thread of the host uses a tensor in memory of its own. Raises Race."""
        key, extent = self.watch.see(tensor), extent_of(tensor)
        self.order.use(thread, key, words, writes=writes, extent=extent)

    def host_waits(self, known: dict[str, int] | None = None, *, thread: str = HOST) -> None:
        """A thread of the host waits for what a clock has; by default for the current stream."""
        self.order.wait(thread, self.order.clock(self.current) if known is None else known)

    @property
    def reserved(self) -> int:
        """Bytes that the device's allocator has taken, of the memory of all streams."""
        return sum(held.most for name, held in self.order.amounts.items() if name != HOST)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """What is computed inside, and the memory that is taken, is of this stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def forget(self, key: int) -> None:
        """A memory was freed."""
        self.under_way.pop(key, None)
        if early := self.order.free(key):
            self.too_early.append(early)

    def look_back(self) -> None:
        """Raises TooEarly where memory was freed too early since the last operation."""
        if self.too_early:
            raise TooEarly(self.too_early.popleft())

    def make_stream(self, device: torch.device, *, is_urgent: bool = False) -> LateStream:
        """A side stream, as mpctl.train.transport.streams.side_stream makes one of a device."""
        self.streams += 1
        return LateStream(self, f"side stream {self.streams}")

    def close(self) -> None:
        """Everything has to have come to an end, and to have been waited for. Raises TooEarly."""
        self.look_back()
        for work in self.works:
            if not work.is_awaited:
                raise TooEarly(f"nobody waits for {work.words}")
            work.finish()

    @contextmanager
    def entered(self) -> Iterator[LateWorld]:
        """Operations inside are watched."""
        with self.watch, HostCalls(self):
            yield self
        self.close()


class Steps:
    """What a thread does, one step after the other."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.put = self.queue.put
        threading.Thread(target=self._do, name="late", daemon=True).start()

    def _do(self) -> None:
        while True:
            self.queue.get()()


class LateGroup(dist.ProcessGroup):
    """One communicator: a gloo group, and the thread that does its messages in order."""

    def __init__(self, world: LateWorld, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.world, self.inner = world, inner
        self.steps = world.all_steps or Steps()
        world.groups += 1
        self.number = world.groups

    @property
    def stream(self) -> str:
        """The name of the stream that its messages run on."""
        return f"the stream of {self.words} (group {self.number})"

    @property
    def words(self) -> str:
        """Its name: `tp 0-1`, or what torch calls it."""
        return self.group_desc or "a group"

    def getBackendName(self) -> str:
        """What torch asks."""
        return "late"

    def _start(
        self,
        kind: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        do: Callable[[list[Tensor], list[Tensor]], None],
    ) -> LateWork:
        """Have a message done later. do: is given copies of `reads`, and tensors like `writes`,
        which are copied back."""
        world = self.world
        work = world.start(self, kind, reads, writes)
        before = world.unfinished()
        sent: list[Tensor] = []
        sources, targets = list(reads), list(writes)  # let go before whoever waits goes on

        def begin() -> None:
            sent.extend(tensor.data.clone() for tensor in sources)
            for tensor in targets:
                poison(tensor.data)  # no version counts it, nor what NCCL writes

        def step() -> None:
            try:
                for one in before:
                    one.finish()
                if before:
                    begin()
                time.sleep(delay)
                received = [torch.empty_like(tensor) for tensor in targets]
                do(sent, received)
                while targets:
                    targets.pop().data.copy_(received.pop())
            except BaseException as error:
                work.error = error
            sources.clear()
            targets.clear()
            work.done.set()

        if not before:
            with world.watch.paused():
                begin()
        delay = world.random.random() * LATEST
        self.steps.put(step)
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> LateWork:
        """See torch.distributed.all_reduce."""

        def do(sent: list[Tensor], received: list[Tensor]) -> None:
            self.inner.allreduce(sent, opts).wait()
            received[0].copy_(sent[0])

        return self._start("all_reduce", tensors, tensors, do)

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any = None) -> LateWork:
        """See torch.distributed.all_gather_into_tensor."""

        def do(sent: list[Tensor], received: list[Tensor]) -> None:
            _method(self.inner, "all_gather_single", "_allgather_base")(received[0], sent[0], opts).wait()

        return self._start("all_gather", [piece], [output], do)

    def reduce_scatter_single(self, output: Tensor, blocks: Tensor, opts: Any = None) -> LateWork:
        """See torch.distributed.reduce_scatter_tensor."""

        def do(sent: list[Tensor], received: list[Tensor]) -> None:
            _method(self.inner, "reduce_scatter_single", "_reduce_scatter_base")(received[0], sent[0], opts).wait()

        return self._start("reduce_scatter", [blocks], [output], do)

    def all_gather_single_coalesced(self, outputs: list[Tensor], pieces: list[Tensor], opts: Any = None) -> LateWork:
        """Several gathers in one call, which end together."""

        def do(sent: list[Tensor], received: list[Tensor]) -> None:
            for whole, piece in zip(received, sent, strict=True):
                _method(self.inner, "all_gather_single", "_allgather_base")(whole, piece).wait()

        return self._start("all_gather", pieces, outputs, do)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], blocks: list[Tensor], opts: Any = None
    ) -> LateWork:
        """Several sums in one call, which end together."""

        def do(sent: list[Tensor], received: list[Tensor]) -> None:
            for own, whole in zip(received, sent, strict=True):
                _method(self.inner, "reduce_scatter_single", "_reduce_scatter_base")(
                    own, whole, dist.ReduceScatterOptions()
                ).wait()

        return self._start("reduce_scatter", blocks, outputs, do)

    def all_to_all_single(self, output: Tensor, blocks: Tensor, into: Any, out_of: Any, opts: Any = None) -> LateWork:
        """See torch.distributed.all_to_all_single."""

        def do(sent: list[Tensor], received: list[Tensor]) -> None:
            _method(self.inner, "all_to_all_single", "alltoall_base")(received[0], sent[0], into, out_of, opts).wait()

        return self._start("all_to_all", [blocks], [output], do)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> LateWork:
        """See torch.distributed.broadcast."""
        is_source = opts.rootRank == self.rank()

        def do(sent: list[Tensor], received: list[Tensor]) -> None:
            self.inner.broadcast(sent if is_source else received, opts).wait()

        reads, writes = (tensors, []) if is_source else ([], tensors)
        return self._start("broadcast", reads, writes, do)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> LateWork:
        """See torch.distributed.reduce; on other ranks than the target the tensor is spoilt."""

        def do(sent: list[Tensor], received: list[Tensor]) -> None:
            self.inner.reduce(sent, opts).wait()
            if opts.rootRank == self.rank():
                received[0].copy_(sent[0])
            else:
                poison(received[0])

        return self._start("reduce", tensors, tensors, do)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> LateWork:
        """See torch.distributed.isend; over when it is received."""

        def do(sent: list[Tensor], received: list[Tensor]) -> None:
            self.inner.send(sent, peer, 2 * tag).wait()
            self.inner.recv([torch.empty(1)], peer, 2 * tag + 1).wait()

        return self._start(f"send to {peer}", tensors, [], do)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> LateWork:
        """See torch.distributed.irecv."""

        def do(sent: list[Tensor], received: list[Tensor]) -> None:
            self.inner.recv(received, peer, 2 * tag).wait()
            self.inner.send([torch.zeros(1)], peer, 2 * tag + 1).wait()

        return self._start(f"receive from {peer}", [], tensors, do)

    def barrier(self, opts: Any = None) -> LateWork:
        """See torch.distributed.barrier: as NCCL's, a sum that the host waits for."""
        work = self.allreduce([torch.zeros(1)], dist.AllreduceOptions())
        work.wait()
        work.finish()
        return work

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # torch < 2.13
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


@dataclass(frozen=True)
class LateMark:
    """A point in the work of a stream: what it knew there, and the messages that it waited for."""

    world: LateWorld
    known: dict[str, int]
    awaited: tuple[LateWork, ...] = ()

    def synchronize(self) -> None:
        """The thread that calls it waits."""
        self.world.host_waits(self.known, thread=host_thread())


@dataclass(frozen=True)
class LateStream(SideStream):
    """A side stream (mpctl/train/transport/streams.py) of a late world: what is computed inside of
    `running` is done at once, and its order is checked."""

    world: LateWorld
    name: str

    def follow(self, mark: Any = None) -> None:
        self._wait(self.name, mark or self.here())

    def running(self) -> AbstractContextManager[None]:
        return self.world.on(self.name)

    def join(self, mark: Any = None) -> None:
        self._wait(self.world.current, mark or self.mark())

    def mark(self) -> LateMark:
        return self._mark(self.name)

    def here(self) -> LateMark:
        return self._mark(self.world.current)

    def record(self, tensor: Tensor) -> None:
        """Tensor.record_stream."""
        self.world.order.keep(self.world.watch.see(tensor), self.name)

    def _mark(self, stream: str) -> LateMark:
        order = self.world.order
        order.wait(stream, order.clock(HOST))
        awaited = tuple(self.world.awaited.get(stream, ()))
        return LateMark(self.world, dict(order.clock(stream)), awaited)

    def _wait(self, stream: str, mark: LateMark) -> None:
        self.world.order.wait(stream, mark.known)
        awaited = self.world.awaited
        both = (*awaited.get(stream, ()), *mark.awaited)
        awaited[stream] = list(dict.fromkeys(both))  # each once: streams that follow each other


def host_thread() -> str:
    """The name of the calling thread of the host: HOST of the one that queues."""
    thread = threading.current_thread()
    return HOST if thread is threading.main_thread() else f"thread {thread.name}"


def join_late(store: dist.Store, rank: int, size: int, timeout: timedelta, *, is_serial: bool = False) -> None:
    """Make a late default group; groups made of it are late too. is_serial: as of LateWorld."""
    world = LateWorld(rank, patience=timeout.total_seconds() / 2, is_serial=is_serial)

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LateGroup:
        return LateGroup(world, dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)

    dist.Backend.register_backend("late", create, devices=["cpu"])
    dist.init_process_group("late", store=store, rank=rank, world_size=size, timeout=timeout)


def poison(tensor: Tensor) -> None:
    """Fill with what no result can be."""
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    tensor.fill_(float("nan") if is_float else 113)


def caller() -> str:
    """Where mpctl or a test started the message under way: file and line."""
    frame = sys._getframe(1)
    skipped = ("tests/late/w", "transport/", "torch/", "contextlib.py")
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in skipped):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}"


def _method(inner: Any, *names: str) -> Callable[..., Any]:
    """The first of these methods that this torch has."""
    return next(getattr(inner, name) for name in names if hasattr(inner, name))
