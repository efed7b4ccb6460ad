"""Whether the world that another program started is the one that a plan needs.

A plan places rank r on node r // gpus_per_node. A world that numbers its processes otherwise, or
has another size, would be another layout than the one that was planned; it is refused, and never
adapted to.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.clusters.joined.world import JoinedWorld
from mpctl.errors import Issue
from mpctl.spec.job import JobSpec
from mpctl.units import plural


def world_issues(world: JoinedWorld, job: JobSpec) -> list[Issue]:
    """Every way in which a world differs from the plan of a resolved job; empty when it is as
    planned.

    Of the processes of a world each sees its own numbers alone: what is wrong with the numbers of
    another one only that one can say.
    """
    return [*_sizes(world, job), *_order(world)]


def _sizes(world: JoinedWorld, job: JobSpec) -> Iterator[Issue]:
    nodes, ranks = job.cluster.nodes, job.cluster.gpus_per_node or 1
    if world.nodes != nodes:
        message = f"{world.starter} started {plural(world.nodes, 'node')}, but the plan has {nodes}"
        yield _issue(world, "nodes", message, _way_out(world, job))
    if world.level == "rank":
        if world.size != job.world_size:
            message = f"{world.starter} started {plural(world.size, 'process', 'processes')}, "
            message += f"but the plan has {plural(job.world_size, 'rank')}"
            yield _issue(world, "size", message, _way_out(world, job))
        if world.per_node != ranks:
            message = f"{world.starter} started {plural(world.per_node, 'process', 'processes')} "
            message += f"on node {world.node}, but the plan has {plural(ranks, 'rank')} a node"
            yield _issue(world, "per_node", message, _way_out(world, job))
    elif world.ranks_per_node not in (None, ranks):
        asked = plural(world.ranks_per_node or 0, "rank")
        message = f"{world.starter} was asked for {asked} a node, but the plan has {ranks}"
        yield _issue(world, "ranks_per_node", message, _way_out(world, job))


def _order(world: JoinedWorld) -> Iterator[Issue]:
    """Processes must be numbered node by node, as the plan numbers ranks."""
    expected = world.node * world.per_node + world.local
    if world.level == "rank" and world.process != expected:
        message = (
            f"process {world.process} is number {world.local} of node {world.node}, where the plan "
            f"has rank {expected}: the processes are not numbered node by node"
        )
        hint = {
            "srun": "start the step with srun --distribution=block",
            "mpirun": "start it with mpirun --map-by slot --rank-by slot",
        }.get(world.starter, "start as many processes on each node, in the order of the nodes")
        yield _issue(world, "process", message, hint)


def _issue(world: JoinedWorld, field: str, message: str, hint: str) -> Issue:
    return Issue("world-matches-plan", world.sources[field], message, hint)


def _way_out(world: JoinedWorld, job: JobSpec) -> str:
    """How to start the planned world, or to plan for the one that was started."""
    nodes, ranks = job.cluster.nodes, job.cluster.gpus_per_node or 1
    started = {
        "torchrun": f"--nnodes={nodes} --nproc-per-node={ranks}",
        "srun": f"--nodes={nodes} --ntasks-per-node=1 (or {ranks})",
        "mpirun": f"-n {nodes * ranks} with {ranks} a node",
        "Kubeflow": f"{plural(nodes, 'node')} of {plural(ranks, 'process', 'processes')}",
    }[world.starter]
    here = world.ranks_per_node or (world.per_node if world.level == "rank" else ranks)
    return (
        f"start {world.starter} with {started}, or plan for what was started: --nodes "
        f"{world.nodes} --gpus-per-node {here}"
    )
