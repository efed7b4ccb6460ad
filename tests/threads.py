"""Run a function on n ranks that are threads of this process.

What a layer computes on a rank does not depend on how its messages travel: here a message is a
tensor that the ranks of a group read from each other between two barriers, in a `Group` that is
otherwise the real one, with its blocks, its record and its checks. No process starts, nothing is
sent, and what a rank returns is any object. tests/ranks.py starts real ranks.

    def double(rank: int, size: int, x: Tensor) -> Tensor: ...
    results = run_ranks(double, 4, torch.ones(3))                     # one result a rank
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mpctl.train.transport.exchange import Reduction
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective

TIMEOUT = 60


class _Meeting:
    """Where the ranks of one group meet: what each has brought, and a barrier."""

    def __init__(self, size: int) -> None:
        self.brought: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class ThreadExchange:
    """Collectives of one rank of a group of threads, as mpctl.train.transport.shared.Exchange has them:
    a call returns when the result is there."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.meeting = rank, meeting

    def all_reduce(self, tensor: Tensor, op: Reduction, axis: str) -> None:
        def combined(brought: list[Tensor]) -> Tensor:
            stacked = torch.stack(brought)
            return stacked.amax(0) if op == "max" else _sum(brought)

        tensor.copy_(self._meet(tensor, combined))

    def all_gather(self, blocks: Tensor, piece: Tensor, axis: str) -> None:
        blocks.view(-1).copy_(self._meet(piece, lambda all_: torch.cat([p.view(-1) for p in all_])))

    def reduce_scatter(self, own: Tensor, blocks: Tensor, axis: str) -> None:
        def combined(brought: list[Tensor]) -> Tensor:
            return _sum([each.view(len(brought), -1)[self.rank] for each in brought])

        own.view(-1).copy_(self._meet(blocks, combined))

    def all_to_all(self, received: Tensor, blocks: Tensor, axis: str) -> None:
        received.copy_(self._meet(blocks, lambda all_: torch.stack([b[self.rank] for b in all_])))

    def all_to_all_rows(
        self, received: Tensor, rows: Tensor, send: Sequence[int], receive: Sequence[int], axis: str
    ) -> None:
        parts: Any = rows.detach().split(list(send))
        sent = self._meet(parts, lambda all_: [each[self.rank].clone() for each in all_])
        assert [len(part) for part in sent] == list(receive)
        received.copy_(torch.cat(sent))

    def broadcast(self, tensor: Tensor, source: int, axis: str) -> None:
        sent = self._meet(tensor, lambda all_: all_[source].clone())
        if self.rank != source:
            tensor.copy_(sent)

    def reduce(self, tensor: Tensor, target: int, axis: str) -> None:
        total = self._meet(tensor, _sum if self.rank == target else lambda all_: all_[self.rank])
        if self.rank == target:
            tensor.copy_(total)

    def _meet(self, own: Any, read: Callable[[list[Any]], Any]) -> Any:
        """What `read` makes of all ranks' tensors, which none has changed yet."""
        self.meeting.brought[self.rank] = own.detach() if isinstance(own, Tensor) else own
        self.meeting.barrier.wait(TIMEOUT)
        with _disable_current_modes():  # what the others send is no memory of this rank
            result = read(list(self.meeting.brought))
        self.meeting.barrier.wait(TIMEOUT)
        return result


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


class _World:
    """The groups of one run, made when their first rank asks for them."""

    def __init__(self) -> None:
        self.meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self.lock = threading.Lock()

    def meeting(self, name: str, ranks: tuple[int, ...]) -> _Meeting:
        with self.lock:
            return self.meetings.setdefault((name, ranks), _Meeting(len(ranks)))

    def abort(self) -> None:
        with self.lock:
            for meeting in self.meetings.values():
                meeting.barrier.abort()


_HERE = threading.local()  # the world of the rank that runs in a thread


def group_of(rank: int, ranks: Sequence[int], name: str, log: list[Collective] | None = None) -> Group:
    """The group of these ranks of the run, of which `rank` is this thread's; inside of
    `run_ranks`, or of one rank."""
    record, exchange = None if log is None else log.append, None
    if len(ranks) > 1:
        meeting = _HERE.world.meeting(name, tuple(ranks))
        exchange = ThreadExchange(ranks.index(rank), meeting)
    shared: Any = exchange
    return Group(ranks.index(rank), len(ranks), name=name, record=record, shared=shared)


def run_ranks(function: Callable[..., Any], n: int, *args: Any) -> list[Any]:
    """`function(rank, size, *args)` in n threads; results by rank. Raises what the first rank that
    failed has raised."""
    world, results, errors = _World(), [None] * n, list[BaseException]()

    def run(rank: int) -> None:
        _HERE.world = world
        torch.set_num_threads(1)  # as each process of tests/ranks.py: sums in the same order, to the bit
        try:
            results[rank] = function(rank, n, *args)
        except BaseException as error:
            errors.append(error)
            world.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
