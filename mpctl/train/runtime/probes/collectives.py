"""Collectives along the axes of a mesh, timed and checked as nccl-tests does (doc/PERFORMANCE.md).

All groups of an axis run at once, as they do in training. A case is called `warm_up` times, then
all ranks begin together. The time of a call is the time of `iterations` calls in a row, divided by
their number, on the slowest rank; on CUDA calls are queued. Cases take turns in rounds, A B C A B
C. Collectives run in place, except all-to-all and sendrecv, which have no in-place form.

Before it is timed, a call's result is compared with the expected one. Element i of rank r is (7 i +
3 r + 1) mod m, so that a block of the wrong rank or in the wrong place is detected; m is so small
that sums over all ranks are exact in the data type.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.records.rundir.requests import ADDING, SPLIT, CollectiveAnswer, CollectiveCase, CollectivesRequest
from mpctl.spec.job import JobSpec
from mpctl.train.runtime.mesh import Mesh
from mpctl.train.runtime.probes.measure import agreed_rounds, begin_together, finish_work, values_of_all
from mpctl.train.transport.group import Group

_MODULUS, _SUMMABLE = 64, {torch.bfloat16: 256, torch.float16: 2048, torch.int8: 127, torch.uint8: 255}


@dataclass(frozen=True)
class TimedCollective:
    """A collective of one group. buffer: the full message [elements]; received: the buffer into
    which sendrecv receives, empty for all other kinds."""

    case: CollectiveCase
    group: Group
    buffer: Tensor
    received: Tensor
    root: int = 0

    @classmethod
    def of(cls, case: CollectiveCase, group: Group, device: torch.device, root: int = 0) -> TimedCollective:
        """The case over a group; the group has the case's transport."""
        kind, elements = case["kind"], case["count"]
        elements *= group.size if kind in SPLIT else 1
        buffer = torch.zeros(elements, dtype=getattr(torch, case["dtype"]), device=device)
        received = torch.zeros_like(buffer) if kind == "sendrecv" else buffer.new_empty(0)
        return cls(case, group, buffer, received, root)

    def call(self) -> Tensor:
        """One call; returns its result, of which only a part may be defined, by kind."""
        return _CALLS[self.case["kind"]](self)

    def wrong(self) -> int:
        """Number of elements of this rank that differ from the expected result after one call. The
        buffer is zero afterwards, so that sums of sums stay finite."""
        self.buffer.copy_(self._values(self.group.rank))
        result, wanted = self.call(), self._wanted()
        finish_work(self.buffer.device)
        count = 0 if wanted is None else _different(result, wanted, self.group.size)
        self.buffer.zero_()
        return count

    def seconds(self, *, warm_up: int, iterations: int, begin: Callable[[], None]) -> float:
        """Mean seconds of a call on this rank; begin: returns on all ranks at once."""
        for _ in range(warm_up):
            self.call()
        begin()
        began = time.perf_counter()
        for _ in range(iterations):
            self.call()
        finish_work(self.buffer.device)
        return (time.perf_counter() - began) / iterations

    @property
    def blocks(self) -> Tensor:
        """The buffer as a block for each rank, [t, n]."""
        return self.buffer.view(self.group.size, -1)

    def _values(self, rank: int) -> Tensor:
        """The full message of a rank before the call."""
        device, dtype = self.buffer.device, self.buffer.dtype
        most = _SUMMABLE.get(dtype, _MODULUS * self.group.size)
        modulus = max(2, min(_MODULUS, most // self.group.size))
        places = torch.arange(len(self.buffer), dtype=torch.int32, device=device)
        return places.mul_(7).add_(3 * rank + 1).remainder_(modulus).to(dtype)

    def _wanted(self) -> Tensor | None:
        """The expected result on this rank; None if the kind leaves it undefined."""
        kind, own, ranks = self.case["kind"], self.group.rank, range(self.group.size)
        if kind == "broadcast":
            return self._values(self.root)
        if kind == "sendrecv":
            return self._values((own - 1) % len(ranks))
        if kind == "reduce" and own != self.root:
            return None
        if kind in ADDING:
            total = self._combined()
            return self._block(total, own) if kind == "reduce_scatter" else total
        takes = own if kind == "all_to_all" else None  # else of an all-gather, whose rank r has r
        blocks = [self._block(self._values(r), r if takes is None else takes) for r in ranks]
        return torch.cat(blocks)

    def _combined(self) -> Tensor:
        total = self._values(0)
        for rank in range(1, self.group.size):
            values = self._values(rank)
            total = torch.maximum(total, values) if self.case["op"] == "max" else total.add_(values)
        return total

    def _block(self, whole: Tensor, number: int) -> Tensor:
        return whole.view(self.group.size, -1)[number]


def probe_collectives(request: CollectivesRequest, job: JobSpec, mesh: Mesh) -> Iterator[CollectiveAnswer]:
    """The answers to a request, the same on every rank of `mesh`, which all call it: first the
    transports that some rank lacks, then a timing for each round and case. job: not used."""
    del job
    groups = mesh.groups
    ways = {(case["axis"], case["transport"]): None for case in request["cases"]}
    found = {way: _over(groups[way[0]], way[1]) for way in ways}
    for (axis, transport), group in found.items():
        if not values_of_all(mesh, group is not None).amin().item():
            found[axis, transport] = None
            yield {"event": "absent", "axis": axis, "transport": transport}
    for turn in agreed_rounds(mesh, request["rounds"], request["seconds"]):
        for number, case in enumerate(request["cases"]):
            group = found[case["axis"], case["transport"]]
            if group is not None:
                timed = TimedCollective.of(case, group, mesh.device, request["root"])
                seconds, wrong = _measured(timed, request, mesh)
                yield {"event": "timing", "case": number, "round": turn, "seconds": seconds, "wrong": wrong}


def _over(group: Group, transport: str) -> Group | None:
    """The group over one transport, without counting its traffic; None if it has no such transport.
    It keeps its log: the launcher watches for ranks that hang."""
    plain = replace(group, record=None, timer=None)
    if transport == "shared":
        return plain if group.shared is not None else None
    return replace(plain, shared=None)


def _measured(timed: TimedCollective, request: CollectivesRequest, mesh: Mesh) -> tuple[float, int]:
    wrong = timed.wrong() if request["check"] else 0
    seconds = timed.seconds(
        warm_up=request["warm_up"], iterations=request["iterations"], begin=lambda: begin_together(mesh)
    )
    every = values_of_all(mesh, seconds, wrong)
    return float(every[:, 0].amax()), int(every[:, 1].sum()) if request["check"] else -1


def _different(result: Tensor, wanted: Tensor, ranks: int) -> int:
    """Number of elements that differ by more than the rounding error of a sum in their type."""
    if not wanted.is_floating_point():
        return int((result != wanted).sum())
    rounding = ranks * torch.finfo(wanted.dtype).eps
    return int((~torch.isclose(result.double(), wanted.double(), rtol=rounding, atol=0)).sum())


def _gather(timed: TimedCollective) -> Tensor:
    group = timed.group
    return group.start_all_gather_into(timed.buffer, timed.blocks[group.rank]).wait()


def _send_receive(timed: TimedCollective) -> Tensor:
    """Send to the next and at the same time receive from the previous rank of the group."""
    group = timed.group
    following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    pair = [
        dist.P2POp(dist.isend, timed.buffer, group=group.process_group, group_peer=following),
        dist.P2POp(dist.irecv, timed.received, group=group.process_group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return timed.received


_CALLS: Mapping[str, Callable[[TimedCollective], Tensor]] = {
    "all_reduce": lambda c: c.group.all_reduce(c.buffer, "max" if c.case["op"] == "max" else "sum"),
    "all_gather": _gather,
    "reduce_scatter": lambda c: c.group.start_reduce_scatter_in_place(c.buffer).wait(),
    "all_to_all": lambda c: c.group.all_to_all(c.buffer, 0),
    "broadcast": lambda c: c.group.broadcast(c.buffer, c.root),
    "reduce": lambda c: c.group.start_reduce(c.buffer, c.root).wait(),
    "sendrecv": _send_receive,
}
