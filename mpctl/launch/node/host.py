"""Whether this host can run the ranks of a plan: nodes, GPUs, memory, a loopback address.

`mpctl launch` starts all ranks on the host where it runs. A plan of several nodes is therefore
refused on GPUs, and where a scheduler has allocated several hosts. Elsewhere it runs on CPU, with a
warning that its nodes are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from mpctl.errors import Issue, RunFailed
from mpctl.estimate.job import Estimate
from mpctl.launch.node.address import HOST, free_port
from mpctl.launch.node.device import Device
from mpctl.launch.node.facts import HostFacts
from mpctl.launch.node.machine import Machine
from mpctl.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.units import bytes_text, plural

START_ANYWAY = "--set launch.check_memory=false starts it anyway"


def host_issues(plan: Plan, machine: Machine, device: Device) -> Iterator[Issue]:
    """What this host lacks to run the plan."""
    checks = [_hosts(plan.job, machine, device), _meeting(plan.job)]
    if device == "cuda":
        checks.append(_gpus(plan.job, machine))
    if plan.job.launch.check_memory:
        checks.append(_host_memory(plan, machine, device))
    return chain.from_iterable(checks)


def cluster_host_issues(plan: Plan, hosts: Sequence[HostFacts], device: Device) -> list[Issue]:
    """What hosts that each run one node of a plan lack, named with the host."""
    ranks = plan.job.world_size // len(hosts)
    return [issue for host in hosts for issue in _node_issues(plan, host, ranks, device)]


def _node_issues(plan: Plan, host: HostFacts, ranks: int, device: Device) -> Iterator[Issue]:
    if device == "cuda" and host.machine.gpus < ranks:
        yield Issue(
            "node-fits-host",
            host.name,
            f"the plan puts {plural(ranks, 'rank')} on each node, but this host shows "
            f"{plural(host.machine.gpus, 'GPU')}",
            "plan for what the hosts have: --gpus-per-node, or leave the host out",
        )
    if not plan.job.launch.check_memory:
        return
    if device == "cuda":
        yield from device_memory_issues(plan)
    if plan.estimate is not None:
        yield from _memory_issues(plan, plan.estimate, host.machine, ranks, device, host.name)


def rehearsal_warnings(job: JobSpec, machine: Machine, *, hosts: int = 1) -> Iterator[str]:
    """Warnings that a run on CPU does not show the speed of the planned cluster."""
    nodes, ranks = job.cluster.nodes, job.world_size // hosts
    if machine.idle_gpus and job.launch.device == "auto":
        yield (
            f"{plural(machine.idle_gpus, 'GPU')} on the PCI bus of this host, and no driver offers "
            "one: ranks run on its CPU (`mpctl doctor` tells more)"
        )
    if nodes > hosts:
        yield f"the {nodes} nodes of the plan are simulated on the CPU of this host"
    if ranks > machine.cores:
        yield (
            f"{ranks} ranks share {plural(machine.cores, 'core')}: the speed of this run says "
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
            f"use {'fewer ranks, ' if machine.gpus else ''}--device cpu to run the same ranks on "
            "its cores, or --rehearse to simulate them",
        )


def device_memory_issues(plan: Plan) -> Iterator[Issue]:
    """Whether the fullest rank fits the memory of the cluster's device, as the plan says."""
    if plan.fits is False:
        (check,) = [check for check in plan.checks if check.rule == "memory-fits"]
        hint = f"{check.hint}; {START_ANYWAY}"
        yield Issue("world-fits-memory", check.where, check.message, hint)


def _host_memory(plan: Plan, machine: Machine, device: Device) -> Iterator[Issue]:
    """What all ranks need must be free on this one host, and on its devices."""
    if device == "cuda":
        yield from device_memory_issues(plan)
    if plan.estimate is not None:
        ranks = plan.job.world_size
        yield from _memory_issues(plan, plan.estimate, machine, ranks, device, "cluster")


def _memory_issues(
    plan: Plan, estimate: Estimate, machine: Machine, ranks: int, device: Device, where: str
) -> Iterator[Issue]:
    """Whether a host has the memory for its ranks: on CPU for the peak of a step, and everywhere
    for the copies that checkpoints are written from."""
    need = 0 if device == "cuda" else _step_bytes(plan, estimate, ranks)
    if need > machine.memory_bytes:
        yield _too_little_memory(estimate, machine, ranks, need, where)
    else:
        yield from _copies(plan, estimate, machine, ranks, beside=need, where=where)


def _copies(
    plan: Plan, estimate: Estimate, machine: Machine, ranks: int, *, beside: int, where: str
) -> Iterator[Issue]:
    """Whether the copies that asynchronous checkpoints are written from fit a host's memory, beside
    the bytes that its ranks need for a step. One rank of each (tp, pp) writes."""
    if not plan.job.checkpoint.asynchronous:
        return
    writers = plan.job.parallel.tp * plan.job.parallel.pp
    copies = estimate.checkpoint_bytes * min(ranks, writers) // writers
    if beside + copies <= machine.memory_bytes:
        return
    step = f" beside {bytes_text(beside)} at the peak of a step" if beside else ""
    message = (
        f"checkpoints are written from copies in host memory, {bytes_text(copies)} on this "
        f"machine{step}, but {bytes_text(machine.memory_bytes)} are free"
    )
    way_out = "use --set checkpoint.asynchronous=false, which saves between two steps"
    yield Issue("copies-fit-memory", where, message, f"{way_out}; {START_ANYWAY}")


def _step_bytes(plan: Plan, estimate: Estimate, ranks: int) -> int:
    """Bytes of `ranks` ranks together at the peak of a step. Where they are not all ranks of the
    plan, each is taken to need what the largest stage needs."""
    peaks = [stage.allocated_bytes for stage in estimate.memory]
    if ranks != plan.job.world_size:
        return ranks * max(peaks)
    return sum(peaks) * (ranks // len(peaks))


def _too_little_memory(
    estimate: Estimate, machine: Machine, ranks: int, need: int, where: str
) -> Issue:
    most = max(estimate.memory, key=lambda stage: stage.allocated_bytes)
    return Issue(
        "world-fits-memory",
        where,
        f"{plural(ranks, 'rank')} take {bytes_text(need)} at the peak of a step, up to "
        f"{bytes_text(most.allocated_bytes)} a rank ({bytes_text(most.state_bytes)} of it weights, "
        f"gradients and optimizer), but {bytes_text(machine.memory_bytes)} are free on this "
        "machine",
        "use --recompute full, a smaller micro batch, a smaller model or fewer replicas; "
        f"{START_ANYWAY}",
    )
