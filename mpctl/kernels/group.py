"""A group of ranks as a value: every layer takes one, no layer asks a global for it.

Collective laws over t ranks (ring): all-reduce = reduce-scatter + all-gather (arXiv 1909.08053,
section 3; 2205.05198, section 4.2.2). A group of one rank does nothing and records nothing, so the
unsharded layer is the same code. Each real collective is reported to `record` with the bytes of
the *whole* message, which lets a run be held against its plan byte by byte.

>>> Group().size, Collective("all_reduce", "tp", 8, "float32").bytes
(1, 8)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.sharding import local_size

Reduction = Literal["sum", "max"]
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


@dataclass(frozen=True)
class Group:
    """Rank `rank` of `size` along axis `name`; process_group None means the default group."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    name: str = "tp"
    record: Callable[[Collective], None] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank {self.rank} is not in a group of {self.size} (0 <= rank < size)"
            )

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """Sum or maximum over the ranks, in place where contiguous: use what is returned."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        self._report("all_reduce", tensor)
        dist.all_reduce(tensor, _REDUCE_OP[op], group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Every rank's piece side by side along `dim`, in rank order."""
        if self.size == 1:
            return tensor
        # [m, .., n, ..] -> [t*m, .., n, ..] -> t of [m, .., n, ..] -> [m, .., t*n, ..]
        whole = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self._report("all_gather", whole)
        _all_gather(whole, tensor.contiguous(), group=self.process_group)
        return whole if dim == 0 else torch.cat(whole.chunk(self.size), dim=dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Sum over the ranks; rank r keeps the r-th of t equal blocks along `dim`."""
        if self.size == 1:
            return tensor
        local_size(tensor.shape[dim], parts=self.size)
        # [m, .., t*n, ..] -> [t*m, .., n, ..] -> [m, .., n, ..]
        blocks = torch.cat(tensor.chunk(self.size, dim=dim))
        self._report("reduce_scatter", blocks)
        own = blocks.new_empty((len(blocks) // self.size, *blocks.shape[1:]))
        _reduce_scatter(own, blocks, group=self.process_group)
        return own

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of the group's rank `source`, in place where contiguous."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        self._report("broadcast", tensor)
        dist.broadcast(tensor, group=self.process_group, group_src=source)
        return tensor

    def _report(self, kind: str, whole: Tensor) -> None:
        if self.record is not None:
            dtype = str(whole.dtype).removeprefix("torch.")
            self.record(Collective(kind, self.name, whole.numel() * whole.element_size(), dtype))
