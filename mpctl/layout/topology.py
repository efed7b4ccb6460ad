"""Where the ranks of a job sit, and how many hold the same parameters: what needs no model."""

from __future__ import annotations

from math import prod

from mpctl.spec.job import JobSpec
from mpctl.topology import Topology


def replicas(job: JobSpec) -> int:
    """Ranks that hold the same parameters, dp x cp, each for other samples or other positions."""
    return job.sizes["dp"] * job.sizes["cp"]


def zero_stage(job: JobSpec) -> int:
    """The ZeRO stage in effect: 0 where a single replica has nothing to share."""
    return job.parallel.zero if replicas(job) > 1 else 0


def job_topology(job: JobSpec) -> Topology:
    """Which rank of a complete job sits where. Raises ValueError where the order names other axes
    than there are."""
    cluster, parallel = job.cluster, job.parallel
    return Topology.of(job.sizes, order=parallel.order, gpus_per_node=cluster.gpus_per_node)


def find_topology(job: JobSpec) -> Topology | None:
    """The job's topology, or None where the axes do not fill the world or their order is none."""
    if prod(job.sizes.values()) != job.world_size:
        return None
    try:
        return job_topology(job)
    except ValueError:
        return None
