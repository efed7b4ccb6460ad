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
    """One rank's place: its coordinates and its groups.

    dp: the replicas that read other samples; replicas: those and the parts of the sequence, over
    which gradients are summed.
    """

    topology: Topology
    rank: int
    device: torch.device
    tp: Group
    cp: Group
    dp: Group
    replicas: Group
    world: Group

    @property
    def coords(self) -> dict[str, int]:
        return self.topology.coords(self.rank)

    @property
    def is_model_writer(self) -> bool:
        """Whether this rank's copy of its parameters is the one that is saved."""
        return self.replicas.rank == 0


def build_mesh(
    topology: Topology, rank: int, device: torch.device, *, record: Record | None = None
) -> Mesh:
    """The mesh of `rank`; every rank of the initialised default group calls it."""
    world = Group(rank, topology.world_size, None, "world", record)
    tp = _group(topology, rank, ("tp",), "tp", record)
    cp = _group(topology, rank, ("cp",), "cp", record)
    replicas = _group(topology, rank, ("dp", "cp"), "dp", record)
    dp = Group(topology.coords(rank)["dp"], topology.sizes["dp"], None, "dp")
    return Mesh(topology, rank, device, tp, cp, dp, replicas, world)


def _group(
    topology: Topology, rank: int, axes: tuple[str, ...], name: str, record: Record | None
) -> Group:
    """The group over `axes` that `rank` is in; the default process group where it is the world."""
    ranks = list(topology.group(rank, *axes))
    place, size = ranks.index(rank), len(ranks)
    if size == 1:
        return Group(name=name)
    if size == topology.world_size:
        return Group(place, size, None, name, record)
    made = dist.new_group(ranks, use_local_synchronization=True)
    return Group(place, size, made, name, record)
