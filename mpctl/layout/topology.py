"""Where the ranks of a job sit, and how they hold its parameters: what needs no model."""

from __future__ import annotations

from math import prod

from mpctl.errors import InputError
from mpctl.sharding import View
from mpctl.spec.job import JobSpec
from mpctl.tensor_grid import TensorGrid
from mpctl.topology import Topology


def replicas(job: JobSpec) -> int:
    """Ranks that hold the same dense parameters, dp x cp, each for other samples or positions."""
    return job.sizes["dp"] * job.sizes["cp"]


def zero_stage(job: JobSpec) -> int:
    """The ZeRO stage in effect for dense parameters: 0 where a single replica has nothing to
    share."""
    return job.parallel.zero if replicas(job) > 1 else 0


def dense_view(job: JobSpec) -> View:
    """How the job's ranks hold the parameters of dense layers. Raises ValueError where its
    tensor-parallel ranks are no grid of its tensor mode."""
    return View(grid=job_grid(job), replicas=replicas(job), zero=zero_stage(job))


def job_topology(job: JobSpec) -> Topology:
    """Which rank of a complete job sits where. Raises InputError where the order names other axes
    than there are, ValueError where the tensor-parallel ranks are no grid of their mode."""
    cluster, parallel = job.cluster, job.parallel
    whole = Topology.of(job.sizes, order=parallel.order, gpus_per_node=cluster.gpus_per_node)
    if parallel.tensor_mode == "1d":
        return whole
    grid = job_grid(job)
    several = {name: axes for name, axes in grid.groups.items() if len(axes) > 1}
    return whole.factored("tp", grid.axes, several)


def job_grid(job: JobSpec) -> TensorGrid:
    """The grid of the job's tensor-parallel ranks. Raises ValueError where they are no grid of its
    tensor mode."""
    p = job.parallel
    return TensorGrid.of(p.tensor_mode, p.tp, p.tensor_depth, sequence_parallel=p.sequence_parallel)


def find_grid(job: JobSpec) -> TensorGrid | None:
    """The grid of the job's tensor-parallel ranks, or None where they are none of its mode."""
    try:
        return job_grid(job)
    except ValueError:
        return None


def find_topology(job: JobSpec) -> Topology | None:
    """The job's topology, or None where the axes do not fill the world, their order is none, or
    the tensor-parallel ranks are no grid."""
    if prod(job.sizes.values()) != job.world_size:
        return None
    try:
        return job_topology(job)
    except (InputError, ValueError):
        return None
