"""A group of ranks as a value: every layer takes one, no layer asks a global for it.

Collective laws over t ranks (ring): all-reduce = reduce-scatter + all-gather (arXiv 1909.08053,
section 3; 2205.05198, section 4.2.2). A group of one rank does nothing and records nothing, so the
unsharded layer is the same code. Each real collective is reported to `record`, when it starts, with
the bytes of the *whole* message, which lets a run be held against its plan byte by byte.

`start_x(..).wait()` is `x(..)`; between the two the caller computes while the message travels.
Along dim d the pieces of a message lie apart in memory, and one copy brings them together, unless
every dimension before d is 1: with [1, s, h] and d=1, a micro batch of one, nothing is copied.
Ranks of one host may share memory (shared.py); what is recorded does not depend on the way taken.

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
    """One collective as it happened: what, over which axis, how many bytes of which dtype."""

    kind: str
    axis: str
    bytes: int
    dtype: str


class Work(Protocol):
    """torch's handle on a collective under way, or ours."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Pending:
    """A collective under way: its result may be read once `wait` has returned it."""

    result: Tensor
    work: Work | None = None

    def wait(self) -> Tensor:
        """Host or, on CUDA, the current stream waits. Not a promise that the kernels have ended."""
        if self.work is not None:
            self.work.wait()
        return self.result


@dataclass(frozen=True)
class _Joined(Pending):
    """Gathered blocks, to be laid side by side along `dim`."""

    dim: int = 0

    def wait(self) -> Tensor:
        # [t, m, .., n, ..] -> [m, .., t, n, ..] -> [m, .., t*n, ..]
        return super().wait().movedim(0, self.dim).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class Group:
    """Rank `rank` of `size` along axis `name`; process_group None means the default group.

    shared: the way through memory, where there is one; otherwise messages go by process_group.
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
        """Sum or maximum over the ranks, in place where contiguous: use what is returned."""
        return self._all_reduce(tensor, op, False).wait()

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Pending:
        """`all_reduce` that does not wait; do not touch `tensor` until it is over."""
        return self._all_reduce(tensor, op, True)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Every rank's piece side by side along `dim`, in rank order."""
        return self._all_gather(tensor, dim, False).wait()

    def start_all_gather(self, tensor: Tensor, dim: int) -> Pending:
        """`all_gather` that does not wait."""
        return self._all_gather(tensor, dim, True)

    def start_all_gather_into(self, whole: Tensor, piece: Tensor) -> Pending:
        """Every rank's piece [n] laid into `whole` [t n], of which `piece` may be this rank's
        part; does not wait."""
        if self.size == 1:
            return Pending(whole if whole is piece else whole.copy_(piece))
        self._report("all_gather", whole)
        if self.shared is not None:
            return Pending(whole, self.shared.all_gather(whole, piece, self.name))
        work = _all_gather(whole, piece, group=self.process_group, async_op=True)
        return Pending(whole, work)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Sum over the ranks; rank r keeps the r-th of t equal blocks along `dim`."""
        return self._reduce_scatter(tensor, dim, False).wait()

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> Pending:
        """`reduce_scatter` that does not wait; leave `tensor` unchanged until it is over."""
        return self._reduce_scatter(tensor, dim, True)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of the group's rank `source`, in place where contiguous."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        self._report("broadcast", tensor)
        if self.shared is not None:
            self.shared.broadcast(tensor, source, self.name).wait()
        else:
            dist.broadcast(tensor, group=self.process_group, group_src=source)
        return tensor

    def _all_reduce(self, tensor: Tensor, op: Reduction, later: bool) -> Pending:
        if self.size == 1:
            return Pending(tensor)
        tensor = tensor.contiguous()
        self._report("all_reduce", tensor)
        if self.shared is not None:
            return Pending(tensor, self.shared.all_reduce(tensor, op, self.name))
        work = dist.all_reduce(tensor, _REDUCE_OP[op], group=self.process_group, async_op=later)
        return Pending(tensor, work)

    def _all_gather(self, tensor: Tensor, dim: int, later: bool) -> Pending:
        if self.size == 1:
            return Pending(tensor)
        blocks = tensor.new_empty((self.size, *tensor.shape))
        self._report("all_gather", blocks)
        work: Work | None
        if self.shared is not None:
            work = self.shared.all_gather(blocks, tensor.contiguous(), self.name)
        else:
            work = _all_gather(
                blocks.view(-1), tensor.reshape(-1), group=self.process_group, async_op=later
            )
        return _Joined(blocks, work, dim % tensor.dim())

    def _reduce_scatter(self, tensor: Tensor, dim: int, later: bool) -> Pending:
        if self.size == 1:
            return Pending(tensor)
        local_size(tensor.shape[dim], parts=self.size)
        dim %= tensor.dim()
        # [m, .., t*n, ..] -> [t, m, .., n, ..] -> [m, .., n, ..]
        blocks = tensor.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        self._report("reduce_scatter", blocks)
        own = blocks.new_empty(blocks.shape[1:])
        if self.shared is not None:
            return Pending(own, self.shared.reduce_scatter(own, blocks, self.name))
        work = _reduce_scatter(
            own.view(-1), blocks.view(-1), group=self.process_group, async_op=later
        )
        return Pending(own, work)

    def _report(self, kind: str, whole: Tensor) -> None:
        if self.record is not None:
            dtype = str(whole.dtype).removeprefix("torch.")
            self.record(Collective(kind, self.name, whole.numel() * whole.element_size(), dtype))
