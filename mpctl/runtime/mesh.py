"""Topology -> process groups: the only place in the project that makes one.

A rank makes just the groups that it is in (`use_local_synchronization`), so that a world of
thousands does not make thousands of groups on every rank. Sizes of 1 need no group at all.

On CPU the groups whose ranks are all on one node also get memory that they share, 4 MiB for each
rank of each group: 32 MiB for an axis of 8 ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mpctl.kernels.group import Collective, Group
from mpctl.kernels.segment import NoSegment, open_segment
from mpctl.kernels.shared import Exchange
from mpctl.spec.job import Launch
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
    topology: Topology,
    rank: int,
    device: torch.device,
    *,
    launch: Launch,
    record: Record | None = None,
) -> Mesh:
    """The mesh of `rank`; every rank of the initialised default group calls it."""
    timeout = launch.timeout_seconds if launch.shared_memory and device.type == "cpu" else None
    everyone = range(topology.world_size)
    world = Group(rank, topology.world_size, None, "world", record)
    world = _sharing(world, everyone, topology, timeout)
    tp = _group(topology, world, ("tp",), "tp", timeout)
    cp = _group(topology, world, ("cp",), "cp", timeout)
    replicas = _group(topology, world, ("dp", "cp"), "dp", timeout)
    dp = Group(topology.coords(rank)["dp"], topology.sizes["dp"], None, "dp")
    return Mesh(topology, rank, device, tp, cp, dp, replicas, world)


def _group(
    topology: Topology, world: Group, axes: tuple[str, ...], name: str, timeout: float | None
) -> Group:
    """The group over `axes` that this rank is in; the world by another name where it is all."""
    ranks = topology.group(world.rank, *axes)
    if len(ranks) == 1:
        return Group(name=name)
    if len(ranks) == world.size:
        return replace(world, name=name)
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    group = Group(ranks.index(world.rank), len(ranks), made, name, world.record)
    return _sharing(group, ranks, topology, timeout)


def _sharing(
    group: Group, ranks: Sequence[int], topology: Topology, timeout: float | None
) -> Group:
    """The group with memory shared by its ranks, if they are on one node and can have it."""
    if timeout is None or group.size == 1 or len({topology.node(rank) for rank in ranks}) > 1:
        return group
    try:
        segment = open_segment(group.rank, ranks, group.process_group)
    except NoSegment as error:
        print(f"{group.name}: no shared memory, messages go through gloo: {error}", flush=True)
        return group
    return replace(group, shared=Exchange(segment, timeout=timeout))
