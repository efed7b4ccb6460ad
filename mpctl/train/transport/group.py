"""A group of ranks as a value: every layer takes one as an argument instead of reading a global.

Over t ranks in a ring an all-reduce is a reduce-scatter and an all-gather (arXiv 1909.08053,
section 3; 2205.05198, section 4.2.2). A group of one rank does nothing and records nothing, so that
the unsharded layer is the same code. Every other collective is reported to `record` when it starts,
with the bytes of the *full* message, so that a run can be compared with its plan byte by byte.

`start_x(..).wait()` is `x(..)`; between the two the caller may compute during the transfer. Ranks
of one host may share memory (exchange.py); what is recorded does not depend on that.

A tensor that is cut along dim d has a rank's part in as many places as there are indices before d:
[b, s, h] cut along s, in each of b samples. Every sample is gathered or scattered by itself, all in
one call (NCCL: one group, which a kernel carries out), so that nothing is copied. Where samples are
below SLICE_BYTES, one message has all, and a copy orders it: as a message of its own a sample would
take the host some 3 us, in which a device copies 4 MiB. By hand, 4 samples of 64 MiB gathered: what
is spared is to read and write 256 MiB, 160 us at 3.3 TB/s.

A group's log, if it has one, says which of its collectives this rank has started and finished, so
that the launcher can find the rank that the others wait for (records/rundir/collective_log.py). A group's
timer receives the time that the rank spent in each (timing.py).

With `is_async` False torch's call blocks, which on CUDA avoids a change of streams.

>>> Group().size, Collective("all_reduce", "tp", 8, "float32").bytes
(1, 8)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from mpctl.core.collectives import Kind
from mpctl.core.sharding import local_size
from mpctl.train.transport.exchange import Exchange, Reduction
from mpctl.train.transport.timing import Collective, SecondsByAxis, Work, timed_start


@dataclass(frozen=True)
class Pending:
    """A pending collective: its result may be read once `wait` has returned it. sent: what it
    reads, if it is to exist as long as this does, as under NCCL it does (a rehearsal counts it)."""

    result: Tensor
    work: Work | None = None
    sent: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that live as long as this object."""
        return (self.result,) if self.sent is None else (self.result, self.sent)

    def wait(self) -> Tensor:
        """The result. The host waits for it; on CUDA the current stream does, and kernels may still
        be running when this returns."""
        if self.work is not None:
            self.work.wait()
        return self.result


@dataclass(frozen=True)
class PendingConcatenation(Pending):
    """Gathered blocks [t, ..], which `wait` concatenates along `dim`."""

    dim: int = 0

    def wait(self) -> Tensor:
        """The blocks side by side."""
        # [t, m, .., n, ..] -> [m, .., t, n, ..] -> [m, .., t*n, ..]
        return super().wait().movedim(0, self.dim).flatten(self.dim, self.dim + 1)


class MessageLog(Protocol):
    """Log of a rank's progress in the messages of one group (records/rundir/collective_log.py has
    that of a run). number: of the group among those of the rank."""

    number: int

    def start(self, kind: Kind, size: int) -> int:
        """Log that a message of `size` bytes starts; returns its number, from 1."""

    def wait(self, number: int) -> None:
        """Log that the rank waits for the result of a message."""

    def finish(self, number: int) -> None:
        """Log that a message, and so all before it, has its result."""

    def channel(self, source: int, destination: int) -> MessageLog | None:
        """The log of messages from one member to another, by their positions in the group."""


@dataclass(frozen=True, slots=True)
class LoggedWork:
    """Work that logs its wait and end. number: that of the collective in its group's log."""

    work: Work
    log: MessageLog
    number: int

    def wait(self) -> None:
        """Return when the result is available; a wait that fails stays in the log as a wait."""
        self.log.wait(self.number)
        self.work.wait()
        self.log.finish(self.number)


def logged_work(work: Work | None, log: MessageLog | None, number: int) -> Work | None:
    """The work, logged if there is a log; None if there is nothing to wait for."""
    return work if work is None or log is None else LoggedWork(work, log, number)


_REDUCE_OP = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 renames both and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SLICE_BYTES = 4 * 2**20
Slices = Sequence[Tensor]


def _resized(tensor: Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])


def _slice_count(tensor: Tensor, dim: int, times: int = 1) -> int:
    """Into how many slices a message that is cut along `dim` falls, one for each index of the
    dimensions before; 0 where they are too small. times: how often it is as large as the tensor."""
    count = math.prod(tensor.shape[:dim])
    return count if count == 1 or tensor.nbytes * times >= count * SLICE_BYTES else 0


def _slices(tensor: Tensor, count: int) -> Slices:
    return (tensor.view(-1),) if count == 1 else tensor.view(count, -1).unbind()


def _each(start: Callable[[Tensor, Tensor, str], Work], results: Slices, sources: Slices, axis: str) -> Work:
    """Start a message a slice through shared memory: with the last, those before are done."""
    *_, last = [start(result, source, axis) for result, source in zip(results, sources, strict=True)]
    return last


def _gather_slices(wholes: Slices, pieces: Slices, *, group: dist.ProcessGroup | None, async_op: bool) -> Work | None:
    if len(wholes) == 1:
        return _all_gather(wholes[0], pieces[0], group=group, async_op=async_op)
    start = _method(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    return _coalesced(start, wholes, pieces, AllgatherOptions(), async_op)


def _scatter_slices(parts: Slices, wholes: Slices, *, group: dist.ProcessGroup | None, async_op: bool) -> Work | None:
    if len(parts) == 1:
        return _reduce_scatter(parts[0], wholes[0], group=group, async_op=async_op)
    start = _method(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    return _coalesced(start, parts, wholes, ReduceScatterOptions(), async_op)


def _coalesced(
    start: Callable[..., Work], results: Slices, sources: Slices, options: Any, async_op: bool
) -> Work | None:
    """Start one call of several messages."""
    options.asyncOp = async_op
    return _started(start(results, sources, options), async_op)


def _method(group: dist.ProcessGroup | None, name: str, before: str) -> Callable[..., Work]:
    """A group's method by the name that torch 2.13 gives it, or by the one before."""
    own = dist.group.WORLD if group is None else group
    method: Callable[..., Work] = getattr(own, name, None) or getattr(own, before)
    return method


def _started(work: Work, async_op: bool) -> Work | None:
    """Work to wait for, or None once it was waited for, as torch's functions return it."""
    if async_op:
        return work
    work.wait()
    return None


@dataclass(frozen=True)
class Group:
    """Rank `rank` of the `size` ranks along axis `name`; by default a group of one rank.

    process_group: torch's group, which transports messages (torch.distributed.group.WORLD for the
    default one). shared: memory that all ranks have mapped, which transports them instead. A group
    of several ranks with neither can build layers, which need only rank and size; its collectives
    raise RuntimeError. record: called with every collective when it starts. log: where this rank
    records its progress in the group's collectives. timer: receives the time that this rank spent
    in them. Raises ValueError for a rank outside of the group.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    name: str = "tp"
    record: Callable[[Collective], None] | None = None
    shared: Exchange | None = None
    log: MessageLog | None = None
    timer: SecondsByAxis | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in a group of {self.size} (0 <= rank < size)")

    @property
    def sends_beside(self) -> bool:
        """Whether a message progresses while this rank computes. It does not through shared memory:
        the ranks copy it themselves, when it is started and while they wait for it."""
        return self.shared is None

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """The elementwise sum or maximum over the ranks, on all of them. A contiguous tensor is
        overwritten: use the returned one."""
        return self.start_all_reduce(tensor, op, is_async=False).wait()

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, is_async: bool = True) -> Pending:
        """`all_reduce` without waiting; `tensor` must not be read or written until `wait`."""
        if self.size == 1:
            return Pending(tensor)
        tensor = tensor.contiguous()
        work = self._start(
            "all_reduce",
            tensor,
            is_async,
            lambda shared: shared.all_reduce(tensor, op, self.name),
            partial(dist.all_reduce, tensor, _REDUCE_OP[op]),
        )
        return Pending(tensor, work)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, concatenated along `dim` in rank order."""
        return self.start_all_gather(tensor, dim, is_async=False).wait()

    def start_all_gather(self, tensor: Tensor, dim: int, *, is_async: bool = True) -> Pending:
        """`all_gather` without waiting."""
        if self.size == 1:
            return Pending(tensor)
        dim %= tensor.dim()
        if count := _slice_count(tensor, dim, self.size):
            whole = tensor.new_empty(_resized(tensor, dim, self.size * tensor.shape[dim]))
            return Pending(whole, self._gather(whole, tensor, is_async, count))
        blocks = tensor.new_empty((self.size, *tensor.shape))
        return PendingConcatenation(blocks, self._gather(blocks, tensor, is_async), dim=dim)

    def start_all_gather_into(self, whole: Tensor, piece: Tensor) -> Pending:
        """Gather the pieces [n] of all ranks into `whole` [t n], without waiting; `piece` may be a
        view of this rank's part of it."""
        if self.size == 1:
            return Pending(whole if whole is piece else whole.copy_(piece))
        return Pending(whole, self._gather(whole, piece, True))

    def _gather(self, whole: Tensor, piece: Tensor, is_async: bool, count: int = 1) -> Work | None:
        """Gather pieces [..] into `whole`, whose first dimension is that of the ranks; or, where
        both have `count` slices, each slice by itself."""
        wholes, pieces = _slices(whole, count), _slices(piece.contiguous(), count)
        return self._start(
            "all_gather",
            whole,
            is_async,
            lambda shared: _each(shared.all_gather, wholes, pieces, self.name),
            partial(_gather_slices, wholes, pieces),
        )

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """The sum over the ranks, of which rank r gets the r-th of t equal blocks along `dim`.

        Raises ValueError where t does not divide the dimension.
        """
        return self.start_reduce_scatter(tensor, dim, is_async=False).wait()

    def start_reduce_scatter(self, tensor: Tensor, dim: int, *, is_async: bool = True) -> Pending:
        """`reduce_scatter` without waiting; `tensor` must not be written until `wait`."""
        if self.size == 1:
            return Pending(tensor)
        dim %= tensor.dim()
        own = tensor.new_empty(_resized(tensor, dim, local_size(tensor.shape[dim], parts=self.size)))
        if count := _slice_count(tensor, dim):
            return self._scatter(own, tensor.contiguous(), is_async, count)
        return self._scatter(own, self._blocks(tensor, dim), is_async)

    def start_reduce_scatter_in_place(self, whole: Tensor) -> Pending:
        """Sum `whole` [t n], contiguous, over the ranks; rank r's result is the r-th of t equal
        parts of `whole`, and the other parts become undefined. It must not be read until `wait`."""
        if self.size == 1:
            return Pending(whole)
        blocks = whole.view(self.size, -1)
        return self._scatter(blocks[self.rank], blocks, True)

    def _scatter(self, local: Tensor, blocks: Tensor, is_async: bool, count: int = 1) -> Pending:
        """Sum the blocks [t, ..] over the ranks, this rank's into `local` [..], which may be a view
        of its block: NCCL (user guide, "In-place Operations"), gloo and shared memory allow it.
        Where both have `count` slices, each of them is summed by itself."""
        parts, wholes = _slices(local, count), _slices(blocks, count)
        work = self._start(
            "reduce_scatter",
            blocks,
            is_async,
            lambda shared: _each(shared.reduce_scatter, parts, wholes, self.name),
            partial(_scatter_slices, parts, wholes),
        )
        return Pending(local, work, blocks)

    def all_to_all(self, tensor: Tensor, dim: int) -> Tensor:
        """Exchange blocks: of t equal blocks along `dim`, rank r gets the r-th of every rank, in
        rank order along `dim`. The shape stays. Raises ValueError where t does not divide it.
        """
        if self.size == 1:
            return tensor
        blocks = self._blocks(tensor, dim)
        received = torch.empty_like(blocks)
        work = self._start(
            "all_to_all",
            blocks,
            False,
            lambda shared: shared.all_to_all(received, blocks, self.name),
            partial(dist.all_to_all_single, received.view(-1), blocks.view(-1)),
        )
        return PendingConcatenation(received, work, dim=dim % tensor.dim()).wait()

    def all_to_all_rows(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, recorded: int | None = None
    ) -> Tensor:
        """Exchange different numbers of rows: of rows [m, ..] the first send[0] go to rank 0, the
        next send[1] to rank 1, and so on; the result has receive[r] rows from rank r, in rank
        order. Zeros are allowed, and one rank gets its rows back.

        recorded: bytes of the message as the plan counts them, on all ranks the same (by default
        those of `rows`, which routing decides). The receiver knows its counts: ranks exchange them
        beforehand. gloo has no int16 and no 8-bit floats: send a view in another type of that size.

        Raises ValueError where the counts do not have one number >= 0 for each rank or those of
        `send` do not sum to m. Ranks whose counts disagree raise RuntimeError, or hang over NCCL.

        >>> Group().all_to_all_rows(torch.ones(2, 3), [2], [2]).shape
        torch.Size([2, 3])
        """
        started = self.start_all_to_all_rows(rows, send, receive, recorded=recorded, is_async=False)
        return started.wait()

    def start_all_to_all_rows(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        *,
        recorded: int | None = None,
        is_async: bool = True,
    ) -> Pending:
        """`all_to_all_rows` without waiting; `rows` must not be written until `wait`."""
        send, receive = list(send), list(receive)
        self._check_counts(len(rows), send, receive)
        if self.size == 1:
            return Pending(rows)
        rows = rows.contiguous()
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = self._start(
            "all_to_all",
            rows,
            is_async,
            lambda shared: shared.all_to_all_rows(received, rows, send, receive, self.name),
            partial(dist.all_to_all_single, received, rows, receive, send),
            recorded,
        )
        return Pending(received, work)

    def _check_counts(self, rows: int, send: list[int], receive: list[int]) -> None:
        for name, counts in (("send", send), ("receive", receive)):
            if len(counts) != self.size or min(counts) < 0:
                raise ValueError(f"{name} = {counts}: give {self.size} numbers >= 0, one a rank")
        if sum(send) != rows or (self.size == 1 and receive != send):
            raise ValueError(f"{rows} rows to send, but send = {send} and receive = {receive} over {self.name}")

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of the group's rank `source`, on all ranks. A contiguous tensor is
        overwritten: use the returned one."""
        return self.start_broadcast(tensor, source, is_async=False).wait()

    def start_broadcast(self, tensor: Tensor, source: int, *, is_async: bool = True) -> Pending:
        """`broadcast` without waiting; `tensor` must not be written until `wait`."""
        if self.size == 1:
            return Pending(tensor)
        tensor = tensor.contiguous()
        work = self._start(
            "broadcast",
            tensor,
            is_async,
            lambda shared: shared.broadcast(tensor, source, self.name),
            partial(dist.broadcast, tensor, group_src=source),
        )
        return Pending(tensor, work)

    def start_reduce(self, tensor: Tensor, target: int) -> Pending:
        """The sum over the ranks on the group's rank `target`, without waiting; what `wait` returns
        on the other ranks is undefined. A contiguous tensor is overwritten."""
        if self.size == 1:
            return Pending(tensor)
        tensor = tensor.contiguous()
        work = self._start(
            "reduce",
            tensor,
            True,
            lambda shared: shared.reduce(tensor, target, self.name),
            partial(dist.reduce, tensor, group_dst=target),
        )
        return Pending(tensor, work)

    def start_send(self, tensor: Tensor, destination: int, *, over: dist.ProcessGroup | None = None) -> Pending:
        """Send a tensor to the group's rank `destination`, without waiting; messages between two
        ranks carry no tags and match in order. over: a process group of only these two."""
        channel = self.log and self.log.channel(self.rank, destination)
        peer, group = (destination, self.process_group) if over is None else (1 - over.rank(), over)
        start = partial(dist.isend, tensor, group=group, group_dst=peer)
        return Pending(tensor, self._send("send", tensor, start, True, channel))

    def start_receive(self, buffer: Tensor, source: int, *, over: dist.ProcessGroup | None = None) -> Pending:
        """Receive a tensor of the group's rank `source` into `buffer`, without waiting. The sender
        records the message. over: as of the sender's `start_send`."""
        channel = self.log and self.log.channel(source, self.rank)
        number = channel.start("send", buffer.nbytes) if channel else 0
        peer, group = (source, self.process_group) if over is None else (1 - over.rank(), over)
        start = partial(dist.irecv, buffer, group=group, group_src=peer)
        collective = self._collective("receive", buffer, log=channel)
        work = timed_start(start, self.timer, collective)
        return Pending(buffer, logged_work(work, channel, number))

    def _blocks(self, tensor: Tensor, dim: int) -> Tensor:
        """A block along `dim` for each rank, [m, .., t*n, ..] -> [t, m, .., n, ..], contiguous."""
        local_size(tensor.shape[dim], parts=self.size)
        dim %= tensor.dim()
        return tensor.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()

    def _start(
        self,
        kind: Kind,
        whole: Tensor,
        is_async: bool,
        share: Callable[[Exchange], Work],
        send: Callable[..., Work | None],
        recorded: int | None = None,
    ) -> Work | None:
        """Start a collective through shared memory (`share`), or over torch's group (`send`)."""
        start: Callable[[], Work | None]
        if self.shared is not None:
            start = partial(share, self.shared)
        else:
            start = partial(send, group=self.process_group, async_op=is_async)
        return self._send(kind, whole, start, is_async, recorded=recorded)

    def _send(
        self,
        kind: Kind,
        whole: Tensor,
        start: Callable[[], Work | None],
        is_async: bool,
        channel: MessageLog | None = None,
        recorded: int | None = None,
    ) -> Work | None:
        """Record, log and start a collective; returns what to wait for, None if `start` has waited.

        channel: the log of a message between two ranks, otherwise that of the group. recorded: the
        bytes of the message if not those of `whole`. Raises RuntimeError if the group has no
        transport.
        """
        if self.process_group is None and self.shared is None:
            raise RuntimeError(
                f"{kind} over {self.name}: the group of {self.size} ranks has no process group "
                "(give it one: torch.distributed.group.WORLD, or one of new_group)"
            )
        log = channel or self.log
        collective = self._collective(kind, whole, recorded, log)
        if self.record is not None:
            self.record(collective)
        number = log.start(kind, collective.bytes) if log else 0
        if log and not is_async and self.shared is None:
            log.wait(number)  # in `start`
        work = timed_start(start, self.timer, collective)
        if log and work is None:
            log.finish(number)
        return logged_work(work, log, number)

    def _collective(
        self, kind: Kind | Literal["receive"], whole: Tensor, recorded: int | None = None, log: MessageLog | None = None
    ) -> Collective:
        size = whole.numel() * whole.element_size() if recorded is None else recorded
        dtype, number = str(whole.dtype).removeprefix("torch."), log.number if log else -1
        return Collective(kind, self.name, size, dtype, number)
