"""A grid on one process: groups whose other ranks send what this one sends.

Shapes, storages and the order of events are those of a rank; the numbers are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpctl.core.tensor_grid import TensorGrid
from mpctl.train.layers.grid.tensor_parallel import tensor_parallel_of
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.exchange import Reduction
from mpctl.train.transport.group import Group, Pending
from tests.train.layers.grid.grids import Where, grid_of


@dataclass
class Events:
    """What happened, in order, such as `start col broadcast 1` and `wait col broadcast 1`.

    buffers: the storages that broadcasts of others filled, by group. partials: those of the sums
    that are under way, by group, at each start of one.
    """

    told: list[str] = field(default_factory=list)
    buffers: dict[str, set[int]] = field(default_factory=dict)
    under_way: dict[str, int] = field(default_factory=dict)
    most_under_way: dict[str, int] = field(default_factory=dict)

    def start(self, name: str, kind: str) -> None:
        """One more collective of this kind of the group is under way."""
        self.told.append(f"start {name}")
        self.under_way[kind] = count = self.under_way.get(kind, 0) + 1
        self.most_under_way[kind] = max(count, self.most_under_way.get(kind, 0))

    def wait(self, name: str, kind: str) -> None:
        """Its result is there."""
        self.told.append(f"wait {name}")
        self.under_way[kind] -= 1


@dataclass(frozen=True)
class _Told(Pending):
    events: Events = field(default_factory=Events)
    name: str = ""
    kind: str = ""

    def wait(self) -> Tensor:
        self.events.wait(self.name, self.kind)
        return self.result


@dataclass(frozen=True)
class EchoGroup(Group):
    """One of `size` ranks that all send the same."""

    events: Events = field(default_factory=Events)

    def _told(self, kind: str, result: Tensor, number: str = "") -> Pending:
        name = f"{self.name} {kind}{number}"
        self.events.start(name, f"{self.name} {kind}")
        return _Told(result, events=self.events, name=name, kind=f"{self.name} {kind}")

    def start_broadcast(self, tensor: Tensor, source: int, *, is_async: bool = True) -> Pending:
        if source != self.rank:
            storage = tensor.untyped_storage().data_ptr()
            self.events.buffers.setdefault(self.name, set()).add(storage)
            tensor.fill_(source)
        return self._told("broadcast", tensor, f" {source}")

    def start_reduce(self, tensor: Tensor, target: int) -> Pending:
        return self._told("reduce", tensor, f" {target}")

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, is_async: bool = True) -> Pending:
        return self._told("all_reduce", tensor)

    def start_all_gather(self, tensor: Tensor, dim: int, *, is_async: bool = True) -> Pending:
        return self._told("all_gather", torch.cat([tensor] * self.size, dim))

    def start_reduce_scatter(self, tensor: Tensor, dim: int, *, is_async: bool = True) -> Pending:
        own = tensor.chunk(self.size, dim)[self.rank].clone()
        return self._told("reduce_scatter", own)


def echo_context(where: Where, rank: int, *, dtype: torch.dtype = torch.float32) -> tuple[ShardContext, Events]:
    """The context of one rank of a grid, whose groups echo, and what happens in them."""
    grid, events = grid_of(where), Events()
    tp = EchoGroup(rank, grid.size, name="tp", events=events)
    groups = {name: _echo(grid, rank, axes, name, events) for name, axes in grid.groups.items()}
    mode = tensor_parallel_of(grid.mode)
    made = ShardContext(tp, dtype=dtype, tensor_parallel=mode, grid=grid, groups=groups)
    return made, events


def _echo(grid: TensorGrid, rank: int, axes: tuple[str, ...], name: str, events: Events) -> EchoGroup:
    place = grid.coords(rank)
    slowest_first = tuple(axis for axis in reversed(grid.axes) if axis in axes)
    number = grid.block(grid.parts(axes), slowest_first, place).start
    return EchoGroup(number, grid.parts(axes), name=name, events=events)
