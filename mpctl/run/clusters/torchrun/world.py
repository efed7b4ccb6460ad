"""The world that another program started, read from the environment of one of its processes.

Programs that start processes on several hosts set variables with the place of each process, and use
the same names for different things:

    torchrun    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK: a process a rank
    Kubeflow    PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE: a process a node. A PyTorchJob also
                sets RANK, to the number of the *node*; LOCAL_RANK is set by torchrun alone.
    Slurm       SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID and the sizes of the step: a process a
                node (srun --ntasks-per-node=1) or a process a rank. SLURM_NTASKS and SLURM_NNODES
                are those of the job, which may be larger than the step.
    Open MPI    OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE: a process a node or a rank

torchrun inside of a pod or of a Slurm step sets its own variables in addition to those of the outer
world, so the innermost is searched for first, in this order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mpctl.core.cores import cpu_quota, usable_cores, within_quota
from mpctl.core.errors import InputError, Issue
from mpctl.core.units import plural
from mpctl.run.hosts.machine import HostFacts
from mpctl.spec.job import JobSpec

Environment = Mapping[str, str]
Level = Literal["node", "rank"]


@dataclass(frozen=True)
class JoinedWorld:
    """A world and this process's place in it.

    starter: the program that started it; level: whether a process represents a node, whose ranks it
    is to start, or a single rank. size: number of processes; process: the number of this one;
    nodes, node: the same for hosts; per_node: processes on this host; local: the number of this one
    there. ranks_per_node: how many ranks a node the starter was asked for, None where it has no
    such variable. sources: the variables that size, process, nodes, node and per_node were read
    from, for messages.
    """

    starter: str
    level: Level
    size: int
    process: int
    nodes: int
    node: int
    per_node: int
    local: int
    ranks_per_node: int | None
    sources: Mapping[str, str]

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that supervises the launch."""
        return self.process == 0


def find_world(environment: Environment) -> JoinedWorld | None:
    """The world that this process is part of; None if no variable shows one.

    Raises InputError with every variable that is missing or no number.
    """
    if {"LOCAL_RANK", "WORLD_SIZE"} <= environment.keys():
        return _torchrun(environment)
    if {"PET_NNODES", "PET_NODE_RANK"} <= environment.keys():
        return _kubeflow(environment)
    # A step of one task may be the shell of salloc or of `srun --pty`, from which all nodes of the
    # allocation are used.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    if "SLURM_STEP_ID" in environment and tasks.isdecimal() and int(tasks) > 1:
        return _slurm(environment)
    return _open_mpi(environment) if "OMPI_COMM_WORLD_RANK" in environment else None


def require_world(environment: Environment) -> JoinedWorld:
    """The world that this process is part of, as requested by `--on torchrun`: a step of Slurm with
    a single task is one, too. Raises InputError without one."""
    world = find_world(environment)
    if world is None and "SLURM_STEP_ID" in environment:
        world = _slurm(environment)
    if world is None:
        raise InputError.of(
            "no-world",
            "--on",
            "torchrun was asked for, but this process is not part of a world: none of LOCAL_RANK "
            "(torchrun), PET_NODE_RANK (Kubeflow), SLURM_STEP_ID (srun) and OMPI_COMM_WORLD_RANK "
            "(mpirun) is set",
            "start it by one of these programs, or use --on local, ssh or slurm",
        )
    return world


def _torchrun(environment: Environment) -> JoinedWorld:
    sources = {
        "size": "WORLD_SIZE",
        "process": "RANK",
        "per_node": "LOCAL_WORLD_SIZE",
        "local": "LOCAL_RANK",
        "node": "GROUP_RANK",
    }
    numbers = _numbers(environment, sources)
    sources["nodes"] = "WORLD_SIZE / LOCAL_WORLD_SIZE"
    nodes = -(-numbers["size"] // max(1, numbers["per_node"]))
    return JoinedWorld("torchrun", "rank", nodes=nodes, ranks_per_node=None, sources=sources, **numbers)


def _kubeflow(environment: Environment) -> JoinedWorld:
    sources = {"nodes": "PET_NNODES", "node": "PET_NODE_RANK"}
    low, _, high = environment["PET_NNODES"].rpartition(":")
    if low and low != high:
        raise InputError.of(
            "elastic-world",
            "PET_NNODES",
            f"{environment['PET_NNODES']} lets the number of nodes change, and a plan has one",
            "start the job with a fixed number of nodes, without an elastic policy",
        )
    numbers = _numbers({**environment, "PET_NNODES": high}, sources)
    ranks = environment.get("PET_NPROC_PER_NODE", "")
    sources |= {"size": "PET_NNODES", "process": "PET_NODE_RANK", "ranks_per_node": "PET_NPROC_PER_NODE"}
    return JoinedWorld(
        "Kubeflow",
        "node",
        size=numbers["nodes"],
        process=numbers["node"],
        per_node=1,
        local=0,
        ranks_per_node=int(ranks) if ranks.isdecimal() else None,
        sources=sources,
        **numbers,
    )


def _slurm(environment: Environment) -> JoinedWorld:
    sources = {
        "size": "SLURM_STEP_NUM_TASKS",
        "process": "SLURM_PROCID",
        "local": "SLURM_LOCALID",
        "nodes": "SLURM_STEP_NUM_NODES",
        "node": "SLURM_NODEID",
    }
    numbers = _numbers(environment, sources)
    sources["per_node"] = "SLURM_STEP_TASKS_PER_NODE"
    counts = task_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = numbers["node"]
    per_node = counts[node] if node < len(counts) else numbers["size"] // max(1, numbers["nodes"])
    return JoinedWorld(
        "srun",
        "node" if numbers["size"] == numbers["nodes"] else "rank",
        per_node=per_node,
        ranks_per_node=None,
        sources=sources,
        **numbers,
    )


def task_counts(text: str) -> list[int]:
    """Slurm's short form of the tasks on each node.

    >>> task_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _open_mpi(environment: Environment) -> JoinedWorld:
    prefix = "OMPI_COMM_WORLD_"
    sources = {
        "size": f"{prefix}SIZE",
        "process": f"{prefix}RANK",
        "local": f"{prefix}LOCAL_RANK",
        "per_node": f"{prefix}LOCAL_SIZE",
    }
    numbers = _numbers(environment, sources)
    per_node = max(1, numbers["per_node"])
    sources |= {"nodes": f"{prefix}SIZE / {prefix}LOCAL_SIZE", "node": f"{prefix}RANK"}
    return JoinedWorld(
        "mpirun",
        "node" if per_node == 1 else "rank",
        nodes=-(-numbers["size"] // per_node),
        node=numbers["process"] // per_node,
        ranks_per_node=None,
        sources=sources,
        **numbers,
    )


def _numbers(environment: Environment, sources: Mapping[str, str]) -> dict[str, int]:
    """The values of variables, by the field that each is for. Raises InputError with an issue for
    each that is missing or no number."""
    issues, numbers = [], {}
    for name, variable in sources.items():
        text = environment.get(variable, "")
        if text.isdecimal():
            numbers[name] = int(text)
        else:
            message = f"{text!r} is not a number" if text else "is not set"
            issues.append(
                Issue(
                    "bad-world",
                    variable,
                    f"{message}, though other variables of the program that started this process are",
                    "unset them all, or start it again by that program",
                )
            )
    if issues:
        raise InputError(issues)
    return numbers


def world_issues(world: JoinedWorld, job: JobSpec) -> list[Issue]:
    """Every way in which a world differs from the plan of a resolved job; empty when it is as
    planned.

    A plan places rank r on node r // gpus_per_node. A world that numbers its processes otherwise,
    or has another size, would be another layout than the planned one, and is refused. Each process
    checks its own numbers, which no other process sees.
    """
    nodes, ranks = job.cluster.nodes, job.cluster.gpus_per_node or 1
    here, way_out = plural(world.per_node, "process", "processes"), _way_out(world, job)
    expected = world.node * world.per_node + world.local
    found: list[tuple[str, str]] = []  # a field, and how the world differs in it
    if world.nodes != nodes:
        started = plural(world.nodes, "node")
        found.append(("nodes", f"started {started}, but the plan has {nodes}"))
    if world.level == "rank" and world.size != job.world_size:
        started = plural(world.size, "process", "processes")
        planned = plural(job.world_size, "rank")
        found.append(("size", f"started {started}, but the plan has {planned}"))
    if world.level == "rank" and world.per_node != ranks:
        planned = f"the plan has {plural(ranks, 'rank')} a node"
        found.append(("per_node", f"started {here} on node {world.node}, but {planned}"))
    if world.level == "node" and world.ranks_per_node not in (None, ranks):
        asked = plural(world.ranks_per_node or 0, "rank")
        message = f"was asked for {asked} a node, but the plan has {ranks}"
        found.append(("ranks_per_node", message))
    issues = [
        Issue("world-matches-plan", world.sources[field], f"{world.starter} {message}", way_out)
        for field, message in found
    ]
    if world.level == "rank" and world.process != expected:
        message = (
            f"process {world.process} is number {world.local} of node {world.node}, where the plan "
            f"has rank {expected}: the processes are not numbered node by node"
        )
        hint = {
            "srun": "start the step with srun --distribution=block",
            "mpirun": "start it with mpirun --map-by slot --rank-by slot",
        }.get(world.starter, "start as many processes on each node, in the order of the nodes")
        issues.append(Issue("world-matches-plan", world.sources["process"], message, hint))
    return issues


def _way_out(world: JoinedWorld, job: JobSpec) -> str:
    """Return the fix: start the planned world, or plan for the one that was started."""
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


@dataclass(frozen=True)
class JoinedProcess:
    """One process of a joined world. cores: the processor cores that it may use; quota: processors
    that its control group grants, None without a quota."""

    world: JoinedWorld
    cores: tuple[int, ...]
    quota: float | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> JoinedProcess:
        """A process from its document. Raises ValueError or TypeError when it is none."""
        quota = document.get("quota")
        return cls(JoinedWorld(**document["world"]), tuple(document["cores"]), None if quota is None else float(quota))


def describe_process() -> dict[str, Any]:
    """This process, as JSON. Raises InputError when it is not part of a world."""
    world = asdict(require_world(os.environ))
    return {"world": world, "cores": usable_cores(), "quota": cpu_quota()}


def host_of(processes: Sequence[JoinedProcess], facts: Sequence[HostFacts]) -> HostFacts:
    """The facts of one host, from those of the processes on it.

    A process that sees several GPUs sees all of the host; where each sees one, these are different
    ones. The processes share a quota: containers of their own are hosts of their own.
    """
    machines = [fact.machine for fact in facts]
    most = max(machine.gpus for machine in machines)
    cores = {core for process in processes for core in process.cores}
    quotas = [process.quota for process in processes if process.quota is not None]
    machine = replace(
        machines[0],
        cores=within_quota(len(cores), min(quotas, default=None)),
        gpus=most if most > 1 else sum(machine.gpus for machine in machines),
        memory_bytes=min(machine.memory_bytes for machine in machines),
    )
    return replace(facts[0], machine=machine)
