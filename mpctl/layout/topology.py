"""The placement of a job's ranks and the views of its parameters, without a model."""

from __future__ import annotations

from math import prod

from mpctl.axes import EXPERT_UNIONS, dense_order, expert_order
from mpctl.errors import InputError
from mpctl.sharding import EXPERTS, View, local_range
from mpctl.spec.job import JobSpec
from mpctl.tensor_grid import DimGrid, TensorGrid
from mpctl.topology import Topology


def replicas(job: JobSpec) -> int:
    """Ranks that hold the same dense parameters, dp x cp, each for different samples or
    positions."""
    return job.sizes["dp"] * job.sizes["cp"]


def zero_stage(job: JobSpec) -> int:
    """The ZeRO stage in effect for dense parameters: 0 with a single replica."""
    return job.parallel.zero if replicas(job) > 1 else 0


def dense_view(job: JobSpec) -> View:
    """How the job's ranks hold the parameters of dense layers. Raises ValueError where its
    tensor-parallel ranks form no grid of its tensor mode."""
    return View(grid=job_grid(job), replicas=replicas(job), zero=zero_stage(job))


def expert_view(job: JobSpec) -> View:
    """How the job's ranks hold the experts of a layer: expert j is on the ranks at ep index
    j // (experts / ep), in parts over etp, and repeated over edp."""
    sizes = job.expert_sizes
    axes = {axis: sizes[axis] for axis in ("etp", "ep")}
    grid = DimGrid(axes, {"experts": "ep", "expert_ffn": "etp"})
    zero = job.parallel.zero if sizes["edp"] > 1 else 0
    ordered = {axis: sizes[axis] for axis in expert_order(job.parallel.order)}
    return View(EXPERTS, grid, "etp_ep", sizes["edp"], "edp", zero, ordered)


def expert_homes(job: JobSpec) -> list[range]:
    """Which of the experts of each layer the ranks at each place along ep hold, in whole or, with
    etp, in part; empty for a model without experts."""
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
    return whole


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
