"""Topology -> process groups: the only module of the project that makes any.

A rank makes only the groups that it is in (`use_local_synchronization`), so that thousands of ranks
do not make thousands of groups each. An axis of size 1 needs no group.

On a CPU, groups whose ranks are all on one node also get shared memory, 4 MiB for each rank of each
group: 32 MiB for an axis of 8 ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from mpctl.rundir.collective_log import CollectiveLog, rank_ranges
from mpctl.sharding import DENSE, View, Views
from mpctl.spec.launch import LaunchSpec
from mpctl.tensor_grid import TensorGrid
from mpctl.topology import Topology
from mpctl.transport.exchange import Exchange
from mpctl.transport.group import Group
from mpctl.transport.shared import NoSegment, open_segment
from mpctl.transport.timing import Collective, SecondsByAxis

Record = Callable[[Collective], None]


@dataclass(frozen=True)
class AxisPosition:
    """The position of a rank along an axis over which nothing is sent: `rank` of `size`."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Mesh:
    """One rank's coordinates and groups.

    dp: the position among the ranks that read different samples, over which alone nothing is sent;
    dp_cp: the group of the ranks that hold the same parameters for different samples or parts of
    the sequence, over which gradients are reduced. pp: the stages of one pipeline, by number. grid:
    the tp ranks as a grid. groups: every group by its name in plans: these, those of a grid's axes
    (TensorGrid.groups), of other views, and of ZeRO where these cut their replicas (sharding.View).
    """

    topology: Topology
    rank: int
    device: torch.device
    tp: Group
    cp: Group
    dp: AxisPosition
    dp_cp: Group
    pp: Group
    world: Group
    launch: LaunchSpec
    log: CollectiveLog | None = None
    grid: TensorGrid = field(default_factory=TensorGrid)
    groups: Mapping[str, Group] = field(default_factory=dict)

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis, {"tp": 1, ...}."""
        return self.topology.coords(self.rank)

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts for its samples and its part of the sequence: ranks that
        hold other parts of the vocabulary have the same loss."""
        place = self.grid.coords(self.tp.rank)
        is_first = all(place[axis] == 0 for axis in self.grid.feature_axes)
        return is_first and self.pp.rank == self.pp.size - 1


def build_mesh(
    topology: Topology,
    rank: int,
    device: torch.device,
    *,
    launch: LaunchSpec,
    views: Views | None = None,
    record: Record | None = None,
    log: CollectiveLog | None = None,
    timer: SecondsByAxis | None = None,
) -> Mesh:
    """The mesh of `rank`; every rank of the initialised default group calls it.

    views: how ranks hold parameters; by default the dense view of tp in a row.
    record: called with every collective; log: where this rank records its progress in them; timer:
    receives the time that this rank spent in each.
    """
    everyone = dist.group.WORLD if topology.world_size > 1 else None
    world = Group(rank, topology.world_size, everyone, "world", record, timer=timer)
    factory = _GroupFactory(topology, launch, device, world, log)
    world = factory.with_log(world, range(topology.world_size))
    world = factory.with_shared_memory(world, range(topology.world_size))
    factory = replace(factory, world=world)
    # The messages of a group run one after the other: those of cp would wait behind gradients.
    is_separate = topology.sizes["cp"] > 1
    # Messages that a layer waits for are urgent; gradients and samples are not.
    tp = factory.make_axes_group(("tp",), "tp", is_urgent=True)
    dense = View(grid=TensorGrid.of("1d", tp.size)) if views is None else views[DENSE]
    assert isinstance(dense.grid, TensorGrid)
    groups = {"tp": tp}
    for name, axes in dense.grid.groups.items():
        groups[name] = factory.make_axes_group(axes, name, is_urgent=True)
    groups["cp"] = factory.make_axes_group(("cp",), "cp", is_urgent=True)
    groups["dp_cp"] = factory.make_axes_group(("dp_cp",), "dp_cp", is_separate=is_separate)
    groups["pp"] = factory.make_axes_group(("pp",), "pp")
    for view in (views or {}).values():
        for name in (*view.sizes, view.shard_group, view.replica_group):
            if name in groups:
                continue
            ranks = topology.group(rank, name)
            inner = next((axis for axis in view.sizes if topology.group(rank, axis) == ranks), name)
            if inner != name and name == view.shard_group:  # etp_ep where one of them is 1
                groups[name] = factory.with_log(replace(groups[inner], name=name), ranks)
            else:
                is_urgent = name != view.replica_group
                groups[name] = factory.make_axes_group((name,), name, is_urgent=is_urgent)
        if view.copies > 1:
            for name in (view.zero_group, view.copies_group):
                groups[name] = factory.make_axes_group((name,), name)
    return Mesh(
        topology,
        rank,
        device,
        tp=tp,
        grid=dense.grid,
        groups={**groups, "world": world},
        cp=groups["cp"],
        dp_cp=groups["dp_cp"],
        dp=AxisPosition(topology.coords(rank)["dp"], topology.sizes["dp"]),
        pp=groups["pp"],
        world=world,
        launch=launch,
        log=log,
    )


def stage_groups(mesh: Mesh, wanted: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Group]:
    """Groups over some stages of this rank's pipeline, by stage numbers; only those that this rank
    is in. Every rank of the pipeline calls it with the same sets of stages."""
    factory = _GroupFactory(mesh.topology, mesh.launch, mesh.device, mesh.world, mesh.log)
    groups, pp = {}, mesh.topology.group(mesh.rank, "pp")
    for stages in sorted(set(wanted)):
        if len(stages) == len(pp):
            groups[stages] = mesh.pp
            continue
        is_in = mesh.pp.rank in stages
        # torch names a group by the number of groups its ranks made: outsiders make one alone.
        group = factory.make_group([pp[stage] for stage in stages] if is_in else [mesh.rank], "pp")
        if is_in:
            groups[stages] = group
    return groups


def pair_groups(
    mesh: Mesh, pairs: Iterable[tuple[int, int]], name: str
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """The process groups of pairs of stages (sender, receiver) of this rank's pipeline; only the
    pair that this rank is in. Every rank of the pipeline calls it with the same pairs, in which no
    stage occurs twice. name: appears in NCCL's time-out messages."""
    factory = _GroupFactory(mesh.topology, mesh.launch, mesh.device, mesh.world)
    pp = mesh.topology.group(mesh.rank, "pp")
    mine = next((pair for pair in pairs if mesh.pp.rank in pair), None)
    ranks = [mesh.rank] if mine is None else [pp[stage] for stage in mine]
    made = factory.process_group(ranks, name, is_urgent=True)
    return {} if mine is None else {mine: made}


def new_process_group(
    ranks: Sequence[int],
    name: str,
    device: torch.device,
    *,
    timeout: timedelta,
    is_urgent: bool = False,
) -> dist.ProcessGroup:
    """A new process group of these ranks of the default group, described as `NAME RANKS`; all of
    them call it. is_urgent: on CUDA its messages start before waiting kernels of other streams, so
    that a matrix product that fills the device does not delay them."""
    options = None
    if is_urgent and device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # else torch warns that the two differ
    return dist.new_group(
        list(ranks),
        timeout=timeout,
        pg_options=options,
        use_local_synchronization=True,
        group_desc=f"{name} {rank_ranges(ranks)}",  # shown in NCCL's time-out messages
    )


@dataclass(frozen=True)
class _GroupFactory:
    """Makes named groups that contain the rank of `world`."""

    topology: Topology
    launch: LaunchSpec
    device: torch.device
    world: Group
    log: CollectiveLog | None = None

    def make_axes_group(
        self,
        axes: tuple[str, ...],
        name: str,
        *,
        is_separate: bool = False,
        is_urgent: bool = False,
    ) -> Group:
        """The group over `axes`. If it contains all ranks, it is the world under another name,
        unless it has to be `is_separate` or, on CUDA, `is_urgent`."""
        ranks = self.topology.group(self.world.rank, *axes)
        if len(ranks) == 1:
            return Group(name=name)
        is_own = is_separate or (is_urgent and self.device.type == "cuda")
        if len(ranks) == self.world.size and not is_own:
            return self.with_log(replace(self.world, name=name), ranks)
        return self.make_group(ranks, name, is_urgent=is_urgent)

    def make_group(self, ranks: Sequence[int], name: str, *, is_urgent: bool = False) -> Group:
        """The group of these ranks of the world, which all call it, with log and shared memory."""
        process_group, world = self.process_group(ranks, name, is_urgent=is_urgent), self.world
        place = ranks.index(world.rank)
        group = Group(place, len(ranks), process_group, name, world.record, timer=world.timer)
        return self.with_shared_memory(self.with_log(group, ranks), ranks)

    def process_group(
        self, ranks: Sequence[int], name: str, *, is_urgent: bool = False
    ) -> dist.ProcessGroup:
        """A new process group of these ranks, on the factory's device."""
        timeout = timedelta(seconds=self.launch.rank_timeout_seconds)
        return new_process_group(ranks, name, self.device, timeout=timeout, is_urgent=is_urgent)

    def with_log(self, group: Group, ranks: Sequence[int]) -> Group:
        """The group with its part of this rank's collective log, if there is one."""
        return replace(group, log=self.log.group(group.name, ranks)) if self.log else group

    def with_shared_memory(self, group: Group, ranks: Sequence[int]) -> Group:
        """The group with memory shared by its ranks, if they are on one node and can map it."""
        may_share = self.launch.shared_memory and self.device.type == "cpu" and group.size > 1
        if not may_share or len({self.topology.node(rank) for rank in ranks}) > 1:
            return group
        try:
            segment = open_segment(group.rank, ranks, group.process_group)
        except NoSegment as error:
            print(f"{group.name}: no shared memory, messages go through gloo: {error}", flush=True)
            return group
        return replace(group, shared=Exchange(segment, timeout=self.launch.rank_timeout_seconds))


def checkpoint_store(rank: int, world_size: int) -> Store:
    """The key-value store with which the ranks of the default group synchronize while they save; a
    single rank has a private one.

    Each call uses different keys, so that a second training in the same processes does not find
    those of the first; all ranks call it equally often.
    """
    if world_size == 1:
        return HashStore()
    store = PrefixStore("saving", dist.distributed_c10d._get_default_store())
    return PrefixStore(str(store.add(f"trainings/{rank}", 1)), store)
