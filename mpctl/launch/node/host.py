"""Whether this host can run the ranks of a plan: nodes, GPUs, memory, a loopback address.

`mpctl launch` starts all ranks on the host where it runs. A plan of several nodes is therefore
refused on GPUs, and where a scheduler has allocated several hosts. Elsewhere it runs on CPU, with a
warning that its nodes are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Literal

from mpctl.errors import Issue, RunFailed
from mpctl.launch.node.address import HOST, free_port
from mpctl.launch.node.machine import Machine
from mpctl.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.units import bytes_text, plural

Device = Literal["cpu", "cuda"]
START_ANYWAY = "--set launch.check_memory=false starts it anyway"


def host_issues(plan: Plan, machine: Machine, device: Device) -> Iterator[Issue]:
    """What this host lacks to run the plan."""
    checks = [_hosts(plan.job, machine, device), _meeting(plan.job)]
    if device == "cuda":
        checks.append(_gpus(plan.job, machine))
    if plan.job.launch.check_memory:
        checks.append(_device_memory(plan) if device == "cuda" else _host_memory(plan, machine))
    return chain.from_iterable(checks)


def rehearsal_warnings(job: JobSpec, machine: Machine) -> Iterator[str]:
    """Warnings that a run on CPU does not show the speed of the planned cluster."""
    nodes, world = job.cluster.nodes, job.world_size
    if nodes > 1:
        yield f"the {nodes} nodes of the plan are simulated on the CPU of this host"
    if world > machine.cores:
        yield (
            f"{world} ranks share {plural(machine.cores, 'core')}: the speed of this run says "
            "nothing about the planned cluster"
        )


def _hosts(job: JobSpec, machine: Machine, device: Device) -> Iterator[Issue]:
    nodes = job.cluster.nodes
    if nodes == 1 or (device == "cpu" and machine.hosts == 1):
        return
    where = "this one host"
    if machine.hosts > 1:
        where = f"this host alone, one of the {machine.hosts} that the scheduler has allocated"
    way_out = f"plan for one node: --nodes 1 --gpus-per-node {machine.gpus or job.world_size}"
    if machine.hosts == 1:
        way_out += f", or use --device cpu to simulate the {nodes} nodes here"
    message = f"the plan has {nodes} nodes, but all {job.world_size} ranks start on {where}"
    yield Issue("nodes-on-host", "cluster.nodes", message, way_out)


def _meeting(job: JobSpec) -> Iterator[Issue]:
    try:
        free_port(job.world_size)
    except RunFailed as error:
        yield Issue("ranks-can-meet", HOST, str(error))


def _gpus(job: JobSpec, machine: Machine) -> Iterator[Issue]:
    world = job.world_size
    if world > machine.gpus:
        yield Issue(
            "world-fits-machine",
            "cluster",
            f"{plural(world, 'rank')} need {plural(world, 'GPU')}, but this machine shows "
            f"{machine.gpus}",
            "use fewer ranks, or --device cpu to run the same ranks on its cores",
        )


def _device_memory(plan: Plan) -> Iterator[Issue]:
    if plan.fits is False:
        (check,) = [check for check in plan.checks if check.rule == "memory-fits"]
        hint = f"{check.hint}; {START_ANYWAY}"
        yield Issue("world-fits-memory", check.where, check.message, hint)


def _host_memory(plan: Plan, machine: Machine) -> Iterator[Issue]:
    """The memory of all ranks at the peak of a step must be free on this host."""
    if plan.estimate is None:
        return
    world, stages = plan.job.world_size, plan.estimate.memory
    peaks = [stage.allocated_bytes for stage in stages]
    need = sum(peaks) * (world // len(stages))
    if need <= machine.memory_bytes:
        return
    most = max(stages, key=lambda stage: stage.allocated_bytes)
    yield Issue(
        "world-fits-memory",
        "cluster",
        f"{plural(world, 'rank')} take {bytes_text(need)} at the peak of a step, up to "
        f"{bytes_text(most.allocated_bytes)} a rank ({bytes_text(most.state_bytes)} of it weights, "
        f"gradients and optimizer), but {bytes_text(machine.memory_bytes)} are free on this "
        "machine",
        "use --recompute full, a smaller micro batch, a smaller model or fewer replicas; "
        f"{START_ANYWAY}",
    )
