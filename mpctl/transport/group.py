"""A group of ranks as a value: every layer takes one, no layer asks a global for it.

Over t ranks in a ring an all-reduce is a reduce-scatter and an all-gather (arXiv 1909.08053,
section 3; 2205.05198, section 4.2.2). A group of one rank does nothing and records nothing, so that
the unsharded layer is the same code. Every other collective is reported to `record` when it starts,
with the bytes of the *whole* message, so that a run is compared with its plan byte by byte.

`start_x(..).wait()` is `x(..)`; between the two the caller computes while the message travels.
Along dim d the pieces of a message lie apart in memory, and one copy brings them together, unless
every dimension before d is 1: with [1, s, h] and d=1, a micro batch of one, nothing is copied.
Ranks of one host may share memory (shared.py); what is recorded does not depend on that.

A new collective, such as the all-to-all of expert parallelism, is one more method of `Group` beside
those here, with `_begin` to count it (transport/__init__.py says what else).

>>> Group().size, Collective("all_reduce", "tp", 8, "float32").bytes
(1, 8)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from mpctl.sharding import local_size
from mpctl.transport.messages import Reduction
from mpctl.transport.shared import Exchange

_REDUCE_OP = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 renames both and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Collective:
    """One collective of a run.

    kind: all_reduce, all_gather, reduce_scatter or broadcast. axis: name of the group. bytes: of
    the whole message, over all ranks.
    """

    kind: str
    axis: str
    bytes: int
    dtype: str


class Work(Protocol):
    """A handle on a collective under way: torch's, or that of shared memory."""

    def wait(self) -> object:
        """Return when the result is there."""


@dataclass(frozen=True)
class Pending:
    """A collective under way: its result may be read once `wait` has returned it."""

    result: Tensor
    work: Work | None = None

    def wait(self) -> Tensor:
        """The result. The host waits for it; on CUDA the current stream does, and kernels may still
        be running when this returns."""
        if self.work is not None:
            self.work.wait()
        return self.result


@dataclass(frozen=True)
class _PendingConcatenation(Pending):
    """Gathered blocks [t, ..], which `wait` concatenates along `dim`."""

    dim: int = 0

    def wait(self) -> Tensor:
        """The blocks side by side."""
        # [t, m, .., n, ..] -> [m, .., t, n, ..] -> [m, .., t*n, ..]
        return super().wait().movedim(0, self.dim).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class Group:
    """Rank `rank` of the `size` ranks along axis `name`; by default a group of one rank.

    process_group: torch's, over which messages go (torch.distributed.group.WORLD for the default
    one). shared: memory that all ranks have mapped, over which they go instead. A group of several
    ranks with neither can build layers, which need rank and size alone; its collectives raise
    RuntimeError. record: is told of every collective when it starts. Raises ValueError for a rank
    outside of the group.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    name: str = "tp"
    record: Callable[[Collective], None] | None = None
    shared: Exchange | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank {self.rank} is not in a group of {self.size} (0 <= rank < size)"
            )

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """The elementwise sum or maximum over the ranks, on all of them. A contiguous tensor is
        overwritten: use the returned one."""
        return self._all_reduce(tensor, op, False).wait()

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Pending:
        """`all_reduce` without waiting; `tensor` must not be read or written until `wait`."""
        return self._all_reduce(tensor, op, True)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, concatenated along `dim` in rank order."""
        return self._all_gather(tensor, dim, False).wait()

    def start_all_gather(self, tensor: Tensor, dim: int) -> Pending:
        """`all_gather` without waiting."""
        return self._all_gather(tensor, dim, True)

    def start_all_gather_into(self, whole: Tensor, piece: Tensor) -> Pending:
        """Gather the pieces [n] of all ranks into `whole` [t n], of which `piece` may be this
        rank's part, without waiting."""
        if self.size == 1:
            return Pending(whole if whole is piece else whole.copy_(piece))
        self._begin("all_gather", whole)
        if self.shared is not None:
            return Pending(whole, self.shared.all_gather(whole, piece, self.name))
        work = _all_gather(whole, piece, group=self.process_group, async_op=True)
        return Pending(whole, work)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """The sum over the ranks, of which rank r gets the r-th of t equal blocks along `dim`.

        Raises ValueError where t does not divide the dimension.
        """
        return self._reduce_scatter(tensor, dim, False).wait()

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> Pending:
        """`reduce_scatter` without waiting; `tensor` must not be written until `wait`."""
        return self._reduce_scatter(tensor, dim, True)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of the group's rank `source`, on all ranks. A contiguous tensor is
        overwritten: use the returned one."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        self._begin("broadcast", tensor)
        if self.shared is not None:
            self.shared.broadcast(tensor, source, self.name).wait()
        else:
            dist.broadcast(tensor, group=self.process_group, group_src=source)
        return tensor

    def _all_reduce(self, tensor: Tensor, op: Reduction, is_async: bool) -> Pending:
        if self.size == 1:
            return Pending(tensor)
        tensor = tensor.contiguous()
        self._begin("all_reduce", tensor)
        if self.shared is not None:
            return Pending(tensor, self.shared.all_reduce(tensor, op, self.name))
        work = dist.all_reduce(tensor, _REDUCE_OP[op], group=self.process_group, async_op=is_async)
        return Pending(tensor, work)

    def _all_gather(self, tensor: Tensor, dim: int, is_async: bool) -> Pending:
        if self.size == 1:
            return Pending(tensor)
        blocks = tensor.new_empty((self.size, *tensor.shape))
        self._begin("all_gather", blocks)
        work: Work | None
        if self.shared is not None:
            work = self.shared.all_gather(blocks, tensor.contiguous(), self.name)
        else:
            work = _all_gather(
                blocks.view(-1), tensor.reshape(-1), group=self.process_group, async_op=is_async
            )
        return _PendingConcatenation(blocks, work, dim % tensor.dim())

    def _reduce_scatter(self, tensor: Tensor, dim: int, is_async: bool) -> Pending:
        if self.size == 1:
            return Pending(tensor)
        local_size(tensor.shape[dim], parts=self.size)
        dim %= tensor.dim()
        # [m, .., t*n, ..] -> [t, m, .., n, ..] -> [m, .., n, ..]
        blocks = tensor.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        self._begin("reduce_scatter", blocks)
        local = blocks.new_empty(blocks.shape[1:])
        if self.shared is not None:
            return Pending(local, self.shared.reduce_scatter(local, blocks, self.name))
        work = _reduce_scatter(
            local.view(-1), blocks.view(-1), group=self.process_group, async_op=is_async
        )
        return Pending(local, work)

    def _begin(self, kind: str, whole: Tensor) -> None:
        """Record a collective; RuntimeError where the group has no way to send it."""
        if self.process_group is None and self.shared is None:
            raise RuntimeError(
                f"{kind} over {self.name}: the group of {self.size} ranks has no process group "
                "(give it one: torch.distributed.group.WORLD, or one of new_group)"
            )
        if self.record is not None:
            dtype = str(whole.dtype).removeprefix("torch.")
            self.record(Collective(kind, self.name, whole.numel() * whole.element_size(), dtype))
