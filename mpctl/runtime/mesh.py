"""Topology -> process groups: the only place in the project that makes one.

A rank makes just the groups that it is in (`use_local_synchronization`), so that a world of
thousands does not make thousands of groups on every rank. Sizes of 1 need no group at all.

On CPU the groups whose ranks are all on one node also get memory that they share, 4 MiB for each
rank of each group: 32 MiB for an axis of 8 ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from mpctl.spec.job import LaunchSpec
from mpctl.topology import Topology
from mpctl.transport.group import Collective, Group
from mpctl.transport.segment import NoSegment, open_segment
from mpctl.transport.shared import Exchange

Record = Callable[[Collective], None]


@dataclass(frozen=True)
class Mesh:
    """One rank's place: its coordinates and its groups.

    dp: the replicas that read other samples; replicas: those and the parts of the sequence, over
    which gradients are summed. pp: the stages of one pipeline, by their number.
    """

    topology: Topology
    rank: int
    device: torch.device
    tp: Group
    cp: Group
    dp: Group
    replicas: Group
    pp: Group
    world: Group
    launch: LaunchSpec

    @property
    def coords(self) -> dict[str, int]:
        return self.topology.coords(self.rank)

    @property
    def is_model_writer(self) -> bool:
        """Whether this rank's copy of its parameters is the one that is saved."""
        return self.replicas.rank == 0

    @property
    def tells_loss(self) -> bool:
        """Whether this rank speaks for its part of the sequence of its replica."""
        return self.tp.rank == 0 and self.pp.rank == self.pp.size - 1


def build_mesh(
    topology: Topology,
    rank: int,
    device: torch.device,
    *,
    launch: LaunchSpec,
    record: Record | None = None,
) -> Mesh:
    """The mesh of `rank`; every rank of the initialised default group calls it."""
    everyone = range(topology.world_size)
    world = Group(rank, topology.world_size, None, "world", record)
    world = _sharing(world, everyone, topology, launch, device)
    tp = _group(topology, world, ("tp",), "tp", launch, device)
    cp = _group(topology, world, ("cp",), "cp", launch, device)
    # Messages of one group are in line: those of cp would wait behind gradients.
    apart = topology.sizes["cp"] > 1
    replicas = _group(topology, world, ("dp", "cp"), "dp", launch, device, apart=apart)
    dp = Group(topology.coords(rank)["dp"], topology.sizes["dp"], None, "dp")
    pp = _group(topology, world, ("pp",), "pp", launch, device)
    return Mesh(topology, rank, device, tp, cp, dp, replicas, pp, world, launch)


def stage_groups(mesh: Mesh, wanted: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Group]:
    """Groups of some stages of this rank's pipeline, those that it is in; every rank of the
    pipeline calls with the same sets of stages."""
    found, pp = {}, mesh.topology.group(mesh.rank, "pp")
    for stages in sorted(set(wanted)):
        if len(stages) == len(pp):
            found[stages] = mesh.pp
            continue
        is_in = mesh.pp.rank in stages
        # torch names a group by how many its ranks have made: who is outside makes one alone.
        ranks = [pp[stage] for stage in stages] if is_in else [mesh.rank]
        group = _new_group(mesh.topology, mesh.world, ranks, "pp", mesh.launch, mesh.device)
        if is_in:
            found[stages] = group
    return found


def _group(
    topology: Topology, world: Group, axes: tuple[str, ...], name: str, launch: LaunchSpec,
    device: torch.device, *, apart: bool = False,
) -> Group:  # fmt: skip
    """The group over `axes` that this rank is in; the world by another name where it is all and
    need not be `apart`."""
    ranks = topology.group(world.rank, *axes)
    if len(ranks) == 1:
        return Group(name=name)
    if len(ranks) == world.size and not apart:
        return replace(world, name=name)
    return _new_group(topology, world, ranks, name, launch, device)


def _new_group(
    topology: Topology, world: Group, ranks: Sequence[int], name: str, launch: LaunchSpec,
    device: torch.device,
) -> Group:  # fmt: skip
    patience = timedelta(seconds=launch.timeout_seconds)
    made = dist.new_group(list(ranks), timeout=patience, use_local_synchronization=True)
    group = Group(ranks.index(world.rank), len(ranks), made, name, world.record)
    return _sharing(group, ranks, topology, launch, device)


def _sharing(
    group: Group, ranks: Sequence[int], topology: Topology, launch: LaunchSpec, device: torch.device
) -> Group:
    """The group with memory shared by its ranks, if they are on one node and can have it."""
    may_share = launch.shared_memory and device.type == "cpu" and group.size > 1
    if not may_share or len({topology.node(rank) for rank in ranks}) > 1:
        return group
    try:
        segment = open_segment(group.rank, ranks, group.process_group)
    except NoSegment as error:
        print(f"{group.name}: no shared memory, messages go through gloo: {error}", flush=True)
        return group
    return replace(group, shared=Exchange(segment, timeout=launch.timeout_seconds))


def checkpoint_store(rank: int, world_size: int) -> Store:
    """The key-value store at which the ranks of the default group meet; of one rank, its own.

    Each call has keys of its own, so that a second training in the same processes does not find
    those of the first; all ranks call it equally often.
    """
    if world_size == 1:
        return HashStore()
    store = PrefixStore("saving", dist.distributed_c10d._get_default_store())
    return PrefixStore(str(store.add(f"trainings/{rank}", 1)), store)
