"""The placement of a job's ranks and the views of its parameters, without a model."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, prod

from mpctl.core.axes import CP_GROUPS, EXPERT_UNIONS, dense_order, expert_order, zero_groups
from mpctl.core.errors import InputError
from mpctl.core.sharding import EXPERTS, View, local_range
from mpctl.core.tensor_grid import DimGrid, TensorGrid
from mpctl.core.topology import Topology
from mpctl.spec.job import JobSpec


def replicas(job: JobSpec) -> int:
    """Ranks that hold the same dense parameters, dp x cp, each for different samples or
    positions."""
    sizes = job.sizes
    return sizes["dp"] * sizes["cp"]


def zero_stage(job: JobSpec) -> int:
    """The ZeRO stage in effect for dense parameters: 0 where one rank would hold all states."""
    return _zero_of(job, replicas(job))[0]


def zero_copies(job: JobSpec) -> int:
    """How often ZeRO's shares of dense parameters exist: dp x cp / zero_size."""
    return _zero_of(job, replicas(job))[1]


def _zero_of(job: JobSpec, held: int) -> tuple[int, int]:
    """The ZeRO stage in effect among `held` ranks with the same parameters, and how often its
    shares exist there (`View.copies`).

    Dense parameters have dp x cp / zero_size copies. Experts have as many, or the most of these
    that divide their replicas, so that shares of both are over the same nodes; Megatron's instances
    of the distributed optimizer and torchtitan's mesh cut both alike. By hand, dp 16, zero_size 8:
    2 copies; 4 replicas of the experts (ep 4) then share their states over 2, one is never cut.
    """
    zero, size, dense = job.parallel.zero, job.parallel.zero_size, replicas(job)
    copies = gcd(dense // size, held) if size is not None and dense % size == 0 else 1
    return (zero, copies) if zero and size != 1 and held > copies else (0, 1)


def dense_view(job: JobSpec) -> View:
    """How the job's ranks hold the parameters of dense layers. Raises ValueError where its
    tensor-parallel ranks form no grid of its tensor mode."""
    held = replicas(job)
    zero, copies = _zero_of(job, held)
    return View(grid=job_grid(job), replicas=held, zero=zero, copies=copies)


def expert_view(job: JobSpec) -> View:
    """How the job's ranks hold the experts of a layer: expert j is on the ranks at ep index
    j // (experts / ep), in parts over etp, and repeated over edp."""
    sizes = job.expert_sizes
    axes = {axis: sizes[axis] for axis in ("etp", "ep")}
    grid = DimGrid(axes, {"experts": "ep", "expert_ffn": "etp"})
    zero, copies = _zero_of(job, sizes["edp"])
    ordered = {axis: sizes[axis] for axis in expert_order(job.parallel.order)}
    return View(EXPERTS, grid, "etp_ep", sizes["edp"], "edp", zero, ordered, copies)


def expert_homes(job: JobSpec) -> list[range]:
    """Experts of each layer held at each index along ep, in part if etp splits them; empty for a model
    without experts."""
    if job.model is None or job.model.experts is None:
        return []
    ep = job.parallel.ep
    return [local_range(job.model.experts, parts=ep, index=at) for at in range(ep)]


def other_views(job: JobSpec) -> tuple[View, ...]:
    """The views of the job's ranks other than the dense one."""
    return (expert_view(job),) if job.has_experts else ()


def job_topology(job: JobSpec) -> Topology:
    """The place of every rank of a complete job, along the axes of every view. Raises InputError
    where the order does not name the axes or the sizes of a view do not fill the world, ValueError
    where the tensor-parallel ranks form no grid of their mode."""
    cluster, parallel = job.cluster, job.parallel
    order = dense_order(parallel.order)
    whole = Topology.of(job.sizes, order=order, gpus_per_node=cluster.gpus_per_node)
    if parallel.tensor_mode != "1d":
        grid = job_grid(job)
        several = {name: axes for name, axes in grid.groups.items() if len(axes) > 1}
        whole = whole.factored("tp", grid.axes, several)
    for view in other_views(job):
        seen = whole.view(view.sizes, order="-".join(view.sizes), unions=EXPERT_UNIONS)
        whole = whole.joined(seen)
    whole = join_zero_groups(whole, (dense_view(job), *other_views(job)))
    return join_cp_groups(whole, parallel.head_parts)


def join_cp_groups(topology: Topology, inner: int) -> Topology:
    """The topology with the groups of `inner` consecutive ranks of cp that exchange sequence for heads, and
    the rings between them; unchanged where all or none of cp are one.

    >>> cut = join_cp_groups(Topology.of({"tp": 2, "cp": 4}), 2)
    >>> [list(group) for group in cut.groups("cp_a2a")][:2], list(cut.group(1, "cp_p2p"))
    ([[0, 2], [1, 3]], [1, 5])
    """
    cp = topology.sizes["cp"]
    if cp % inner or inner in (1, cp):
        return topology
    sizes: dict[str, int] = {}
    for axis in topology.order:
        parts = dict(zip(CP_GROUPS, (inner, cp // inner), strict=True))
        sizes |= parts if axis == "cp" else {axis: topology.sizes[axis]} if topology.sizes[axis] > 1 else {}
    return topology.joined(topology.view(sizes, order="-".join(sizes)))


def join_zero_groups(topology: Topology, views: Iterable[View]) -> Topology:
    """The topology with the groups that share ZeRO's states and those with equal shares, of the
    views whose replicas are cut: each run of `zero_size` consecutive replicas is one group.

    >>> whole = Topology.of({"tp": 2, "cp": 2, "dp": 4})
    >>> cut = join_zero_groups(whole, [View(replicas=8, zero=1, copies=4)])
    >>> [list(group) for group in cut.groups("zero")][:3], list(cut.group(0, "zero_replicas"))
    ([[0, 2], [1, 3], [4, 6]], [0, 4, 8, 12])
    """
    for view in views:
        if view.copies == 1:
            continue
        seen = topology.view_of(view.replica_group)
        members = {axis for axis in seen.kinds[view.replica_group] if seen.sizes[axis] > 1}
        shared, equal = zero_groups(view.replica_group)
        sizes: dict[str, int] = {}
        for axis in seen.order:
            if axis in members:
                sizes |= {shared: view.zero_size, equal: view.copies}
            elif seen.sizes[axis] > 1:
                sizes[axis] = seen.sizes[axis]
        topology = topology.joined(topology.view(sizes, order="-".join(sizes)))
    return topology


def job_grid(job: JobSpec) -> TensorGrid:
    """The grid of the job's tensor-parallel ranks. Raises ValueError where they form no grid of its
    tensor mode."""
    p = job.parallel
    return TensorGrid.of(p.tensor_mode, p.tp, p.tensor_depth, sequence_parallel=p.sequence_parallel)


def find_grid(job: JobSpec) -> TensorGrid | None:
    """The grid of the job's tensor-parallel ranks, or None where they form none of its mode."""
    try:
        return job_grid(job)
    except ValueError:
        return None


def find_topology(job: JobSpec) -> Topology | None:
    """The job's topology, or None where the axes do not fill the world, their order is invalid, or
    the tensor-parallel ranks form no grid."""
    if prod(job.sizes.values()) != job.world_size:
        return None
    try:
        return job_topology(job)
    except (InputError, ValueError):
        return None
