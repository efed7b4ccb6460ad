"""The process groups of a layout: what a rank makes (train/runtime/mesh.py), and what it holds in memory.

A group that has all ranks is the default group under another name, unless its messages have to run
beside that one's: on an accelerator each group has a communicator, whose messages run one after the
other on its stream. Groups over the same ranks are otherwise one.

Every rank makes the same number of groups in the same order: with a bound device, torch splits
NCCL's communicators from the default one, in which all ranks take part.

NCCL sends over channels, each of which is a block of its kernel: a receive that waits for a
neighbour's tensor keeps as many processors of the GPU busy, 24 to 32 of an H100's 132 by default.
A link between two stages has LINK_CHANNELS: at 20 to 37 GB/s each (NCCL's tables of Ampere and
Hopper, src/graph/tuning.cc) they fill the 50 GB/s of a 400 Gb/s card, and at 80 to 150 GB/s send
within a node what other micro batches hide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mpctl.core.axes import CP_GROUPS
from mpctl.core.sharding import DENSE, View, Views
from mpctl.core.tensor_grid import TensorGrid
from mpctl.core.topology import Group, Topology

LINK_CHANNELS = 4
"""NCCL's channels of a link between two stages, at most."""


class GroupPlan(NamedTuple):
    """A group over `axes`, by its name in plans. is_urgent: a layer waits for its messages, which
    are to start before others'; is_separate: its messages run beside the default group's even if it
    has all ranks. same_as: the name of an earlier group of the same ranks, which it is."""

    name: str
    axes: tuple[str, ...]
    is_urgent: bool = False
    is_separate: bool = False
    same_as: str = ""


def group_plans(topology: Topology, views: Views | None = None) -> Iterator[GroupPlan]:
    """The groups of every rank of a topology, in the order in which they are made; groups of one
    rank are among them. views: how ranks hold parameters; by default in shards over tp in a row."""
    tp = topology.group_size("tp")
    dense = View(grid=TensorGrid.of("1d", tp)) if views is None else views[DENSE]
    assert isinstance(dense.grid, TensorGrid)
    # Messages that a layer waits for are urgent; gradients and samples are not.
    plans = [GroupPlan("tp", ("tp",), is_urgent=True)]
    plans += (GroupPlan(name, axes, is_urgent=True) for name, axes in dense.grid.groups.items())
    plans.append(GroupPlan("cp", ("cp",), is_urgent=True))
    plans += (GroupPlan(name, (name,), is_urgent=True) for name in CP_GROUPS if name in topology.kinds)
    # The messages of a group run one after the other: those of cp would wait behind gradients.
    plans.append(GroupPlan("dp_cp", ("dp_cp",), is_separate=topology.sizes["cp"] > 1))
    plans.append(GroupPlan("pp", ("pp",)))
    yield from plans
    made = {plan.name for plan in plans}
    for view in (views or {}).values():
        for name in (*view.sizes, view.shard_group, view.replica_group):
            if name not in made:
                made.add(name)
                yield _of_view(topology, view, name)
        if view.copies > 1:
            yield from (GroupPlan(name, (name,)) for name in (view.zero_group, view.copies_group))


def _of_view(topology: Topology, view: View, name: str) -> GroupPlan:
    ranks = topology.group(0, name)
    inner = next((axis for axis in view.sizes if topology.group(0, axis) == ranks), name)
    if inner != name and name == view.shard_group:  # etp_ep where one of them is 1
        return GroupPlan(name, (name,), same_as=inner)
    return GroupPlan(name, (name,), is_urgent=name != view.replica_group)


def has_communicator(plan: GroupPlan, size: int, world: int, *, on_device: bool) -> bool:
    """Whether a group of `size` of `world` ranks is one of its own. on_device: on an accelerator,
    where urgent messages run beside the default group's."""
    is_own = plan.is_separate or (plan.is_urgent and on_device)
    return size > 1 and not plan.same_as and (size < world or is_own)


def device_groups(topology: Topology, views: Views) -> Mapping[str, Group]:
    """The ranks of each communicator that rank 0 has on an accelerator, the default one (`world`)
    among them, by name; those of links between stages and of tied parameters are not."""
    size = topology.world_size
    groups: dict[str, Group] = {"world": range(size)} if size > 1 else {}
    for plan in group_plans(topology, views):
        ranks = topology.group(0, *plan.axes)
        if has_communicator(plan, len(ranks), size, on_device=True):
            groups[plan.name] = ranks
    return groups
