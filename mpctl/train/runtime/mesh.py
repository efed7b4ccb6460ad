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

from mpctl.core.sharding import DENSE, View, Views
from mpctl.core.tensor_grid import TensorGrid
from mpctl.core.topology import Topology
from mpctl.model.layout.groups import LINK_CHANNELS, GroupPlan, group_plans, has_communicator
from mpctl.records.rundir.collective_log import CollectiveLog, rank_ranges
from mpctl.spec.launch import LaunchSpec
from mpctl.train.transport.exchange import Exchange
from mpctl.train.transport.group import Group
from mpctl.train.transport.shared import NoSegment, open_segment
from mpctl.train.transport.timing import Collective, SecondsByAxis

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
    loss_stage: int
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
        return is_first and self.pp.rank == self.loss_stage


def build_mesh(
    topology: Topology,
    rank: int,
    device: torch.device,
    *,
    launch: LaunchSpec,
    views: Views | None = None,
    loss_stage: int | None = None,
    record: Record | None = None,
    log: CollectiveLog | None = None,
    timer: SecondsByAxis | None = None,
) -> Mesh:
    """The mesh of `rank`; every rank of the initialised default group calls it.

    views: how ranks hold parameters; by default the dense view of tp in a row. loss_stage: the
    pipeline stage that computes the loss, by default the last.
    record: called with every collective; log: where this rank records its progress in them; timer:
    receives the time that this rank spent in each.
    """
    everyone = dist.group.WORLD if topology.world_size > 1 else None
    world = Group(rank, topology.world_size, everyone, "world", record, timer=timer)
    factory = _GroupFactory(topology, launch, device, world, log)
    world = factory.with_log(world, range(topology.world_size))
    world = factory.with_shared_memory(world, range(topology.world_size))
    factory = replace(factory, world=world)
    groups: dict[str, Group] = {}
    for plan in group_plans(topology, views):
        if plan.same_as:
            renamed = replace(groups[plan.same_as], name=plan.name)
            groups[plan.name] = factory.with_log(renamed, topology.group(rank, plan.name))
        else:
            groups[plan.name] = factory.make_planned_group(plan)
    tp = groups["tp"]
    dense = View(grid=TensorGrid.of("1d", tp.size)) if views is None else views[DENSE]
    assert isinstance(dense.grid, TensorGrid)
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
        loss_stage=groups["pp"].size - 1 if loss_stage is None else loss_stage,
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


def pair_groups(mesh: Mesh, pairs: Iterable[tuple[int, int]], name: str) -> dict[tuple[int, int], dist.ProcessGroup]:
    """The process groups of pairs of stages (sender, receiver) of this rank's pipeline; only the
    pair that this rank is in. Every rank of the pipeline calls it with the same pairs, in which no
    stage occurs twice. name: appears in NCCL's time-out messages."""
    factory = _GroupFactory(mesh.topology, mesh.launch, mesh.device, mesh.world)
    pp = mesh.topology.group(mesh.rank, "pp")
    mine = next((pair for pair in pairs if mesh.pp.rank in pair), None)
    ranks = [mesh.rank] if mine is None else [pp[stage] for stage in mine]
    made = factory.process_group(ranks, name, is_urgent=True, channels=LINK_CHANNELS)
    return {} if mine is None else {mine: made}


def new_process_group(
    ranks: Sequence[int],
    name: str,
    device: torch.device,
    *,
    timeout: timedelta,
    is_urgent: bool = False,
    channels: int | None = None,
) -> dist.ProcessGroup:
    """A new process group of these ranks of the default group, described as `NAME RANKS`; all of
    them call it. is_urgent: on CUDA its messages start before waiting kernels of other streams, so
    that a matrix product that fills the device does not delay them. channels: of NCCL, at most;
    each takes a processor of the GPU while a message travels or is waited for, and memory."""
    options = None
    if (is_urgent or channels) and device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_urgent)
        options._timeout = timeout  # else torch warns that the two differ
        if channels:
            options.config.max_ctas = channels
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

    def make_planned_group(self, plan: GroupPlan) -> Group:
        """The group over the plan's axes that this rank is in: one of its own, the world under
        another name, or no group for a single rank."""
        ranks = self.topology.group(self.world.rank, *plan.axes)
        on_device = self.device.type != "cpu"
        if len(ranks) == 1:
            return Group(name=plan.name)
        if has_communicator(plan, len(ranks), self.world.size, on_device=on_device):
            return self.make_group(ranks, plan.name, is_urgent=plan.is_urgent)
        return self.with_log(replace(self.world, name=plan.name), ranks)

    def make_group(self, ranks: Sequence[int], name: str, *, is_urgent: bool = False) -> Group:
        """The group of these ranks of the world, which all call it, with log and shared memory."""
        process_group, world = self.process_group(ranks, name, is_urgent=is_urgent), self.world
        place = ranks.index(world.rank)
        group = Group(place, len(ranks), process_group, name, world.record, timer=world.timer)
        return self.with_shared_memory(self.with_log(group, ranks), ranks)

    def process_group(
        self, ranks: Sequence[int], name: str, *, is_urgent: bool = False, channels: int | None = None
    ) -> dist.ProcessGroup:
        """A new process group of these ranks, on the factory's device."""
        timeout = timedelta(seconds=self.launch.rank_timeout_seconds)
        return new_process_group(ranks, name, self.device, timeout=timeout, is_urgent=is_urgent, channels=channels)

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
