"""Topology -> process groups: the only place in the project that makes one.

A rank makes just the groups that it is in (`use_local_synchronization`), so that a world of
thousands does not make thousands of groups on every rank. Sizes of 1 need no group at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mpctl.kernels.group import Collective, Group
from mpctl.topology import Topology

Record = Callable[[Collective], None]


@dataclass(frozen=True)
class Mesh:
    """One rank's place: its coordinates and a group along each axis."""

    topology: Topology
    rank: int
    device: torch.device
    tp: Group
    dp: Group
    world: Group

    @property
    def coords(self) -> dict[str, int]:
        return self.topology.coords(self.rank)

    @property
    def is_model_writer(self) -> bool:
        """Whether this rank's copy of its parameters is the one that is saved."""
        return self.coords["dp"] == 0


def build_mesh(
    topology: Topology, rank: int, device: torch.device, *, record: Record | None = None
) -> Mesh:
    """The mesh of `rank`; every rank of the initialised default group calls it."""
    world = Group(rank, topology.world_size, None, "world", record)
    groups = {axis: _axis_group(topology, rank, axis, record) for axis in ("tp", "dp")}
    return Mesh(topology, rank, device, groups["tp"], groups["dp"], world)


def _axis_group(topology: Topology, rank: int, axis: str, record: Record | None) -> Group:
    ranks = list(topology.group(rank, axis))
    place, size = ranks.index(rank), len(ranks)
    if size == 1:
        return Group(name=axis)
    if size == topology.world_size:
        return Group(place, size, None, axis, record)
    made = dist.new_group(ranks, use_local_synchronization=True)
    return Group(place, size, made, axis, record)
