"""The collectives, as what one rank copies into its slot and reads from everyone's.

Tensors are flat; a message is cut where slots are too small for it. All ranks sum in rank order, so
results are the same bits everywhere and in every run. For that each reads t rows of N bytes, t^2 N
in all, where a ring moves 2 (t-1) N: little more at t=2, and worth it with the few ranks of a host,
whose rows lie in a shared cache: there is one exchange, not two. 16-bit sums are rounded at every
addition, as gloo's are.

Letters: t ranks, n elements of the message, S elements of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from mpctl.collectives import Kind

Reduction = Literal["sum", "max"]
_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}
KINDS: tuple[Kind, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"
)  # fmt: skip


class CollectiveSteps(Protocol):
    """One collective, as what this rank does with a cut of its message (a slice of elements)."""

    @property
    def kind(self) -> Kind:
        """One of KINDS."""

    def put(self, slot: Tensor, cut: slice) -> None:
        """Copy this rank's share of the cut into its slot [S]."""

    def take(self, rows: Tensor, cut: slice) -> None:
        """Combine the cut from the slots of all ranks [t, S], once all have put theirs."""


@dataclass(frozen=True)
class AllReduce:
    """flat [n] becomes the sum or maximum over the ranks."""

    flat: Tensor
    op: Reduction
    kind: ClassVar[Kind] = "all_reduce"

    def put(self, slot: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        slot[: length(cut)].copy_(self.flat[cut])

    def take(self, rows: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        _combine(rows[:, : length(cut)].unbind(), self.op, self.flat[cut])


@dataclass(frozen=True)
class AllGather:
    """The pieces [n] of all ranks are copied to blocks [t, n]."""

    piece: Tensor
    blocks: Tensor
    kind: ClassVar[Kind] = "all_gather"

    def put(self, slot: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        slot[: length(cut)].copy_(self.piece[cut])

    def take(self, rows: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        self.blocks[:, cut].copy_(rows[:, : length(cut)])


@dataclass(frozen=True)
class ReduceScatter:
    """result [n] becomes the sum over the ranks of block `rank` of their blocks [t, n]; what a rank
    has of its own block is not sent. The result may be that block."""

    blocks: Tensor
    result: Tensor
    rank: int
    kind: ClassVar[Kind] = "reduce_scatter"

    def put(self, slot: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        _put_for_others(slot, self.blocks, self.rank, cut)

    def take(self, rows: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        parts = list(_for_rank(rows, self.rank, cut).unbind())
        own, result = self.blocks[self.rank, cut], self.result[cut]
        is_overwritten = self.rank > 1 and own.data_ptr() == result.data_ptr()
        parts[self.rank] = own.clone() if is_overwritten else own
        _combine(parts, "sum", result)


@dataclass(frozen=True)
class AllToAll:
    """received [t, n] becomes block `rank` of the blocks [t, n] of every rank; what a rank has for
    itself is not sent."""

    blocks: Tensor
    received: Tensor
    rank: int
    kind: ClassVar[Kind] = "all_to_all"

    def put(self, slot: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        _put_for_others(slot, self.blocks, self.rank, cut)

    def take(self, rows: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        sent = _for_rank(rows, self.rank, cut)
        for others in (slice(self.rank), slice(self.rank + 1, None)):
            self.received[others, cut].copy_(sent[others])
        self.received[self.rank, cut].copy_(self.blocks[self.rank, cut])


@dataclass(frozen=True)
class Broadcast:
    """flat [n] becomes that of rank `source`."""

    flat: Tensor
    rank: int
    source: int
    kind: ClassVar[Kind] = "broadcast"

    def put(self, slot: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        if self.rank == self.source:
            slot[: length(cut)].copy_(self.flat[cut])

    def take(self, rows: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        if self.rank != self.source:
            self.flat[cut].copy_(rows[self.source, : length(cut)])


@dataclass(frozen=True)
class Reduce:
    """flat [n] of rank `target` becomes the sum over the ranks; that of the others stays."""

    flat: Tensor
    rank: int
    target: int
    kind: ClassVar[Kind] = "reduce"

    def put(self, slot: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        if self.rank != self.target:
            slot[: length(cut)].copy_(self.flat[cut])

    def take(self, rows: Tensor, cut: slice) -> None:
        """See CollectiveSteps."""
        if self.rank == self.target:
            parts = list(rows[:, : length(cut)].unbind())
            parts[self.rank] = self.flat[cut]
            total = torch.empty_like(self.flat[cut])
            _combine(parts, "sum", total)
            self.flat[cut].copy_(total)


def length(cut: slice) -> int:
    """Elements of a cut."""
    return int(cut.stop - cut.start)


def _put_for_others(slot: Tensor, blocks: Tensor, rank: int, cut: slice) -> None:
    """Copy the cut of all blocks [t, n] but the own into a slot [S], one after the other."""
    sent = slot[: len(blocks) * length(cut)].view(len(blocks), -1)
    for others in (slice(rank), slice(rank + 1, None)):
        sent[others].copy_(blocks[others, cut])


def _for_rank(rows: Tensor, rank: int, cut: slice) -> Tensor:
    """What lies in the slots of all ranks [t, S] for rank `rank`, [t, n]."""
    n = length(cut)
    return rows[:, rank * n : (rank + 1) * n]


def _combine(rows: Sequence[Tensor], op: Reduction, out: Tensor) -> None:
    """Combine the rows into `out` in rank order; `out` may share memory with the first two only."""
    combine = _COMBINE[op]
    combine(rows[0], rows[1], out=out)
    for row in rows[2:]:
        combine(out, row, out=out)
