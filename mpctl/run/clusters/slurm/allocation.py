"""The allocation that this process runs in, and the one srun step that starts the node agents.

Slurm describes an allocation by environment variables, in a batch script, below salloc and in
steps. A node's place in this allocation is its index in SLURM_JOB_NODELIST; how srun numbers its
tasks (SLURM_NODEID) depends on --distribution and is not used.

srun reads some sixty SLURM_* variables as options. In a batch script or a step they have the
options of the script itself, such as a task count or a CPU binding, which would change or break a
step inside it. The step therefore gets only those in KEPT and all options on its command line.
Source: man srun, INPUT ENVIRONMENT VARIABLES, of Slurm 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import plural

KEPT = (
    "SLURM_CONF",
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_NODELIST",
    "SLURM_NODELIST",
    "SLURM_CLUSTER_NAME",
    "SLURM_WORKING_CLUSTER",
    "SLURM_NODE_ALIASES",
    "SLURM_JOB_NAME",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NNODES",
    "SLURM_JOB_CPUS_PER_NODE",
    "SLURM_RESTART_COUNT",
    "SLURM_JWT",
    "SLURM_DEBUG_FLAGS",
)
"""Variables that identify the allocation and how to reach Slurm."""
MOST_NODES = 65_536
"""Names in one list of nodes; Slurm's own bound (MAX_SLURM_NODES)."""
ENTRY = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]*\])+")
PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


@dataclass(frozen=True)
class Allocation:
    """Nodes that Slurm has given to this job. nodes: their names, in Slurm's order; gpus: on this node, None if Slurm
    does not report it; tasks_here: tasks in this process's step, 1 outside of a step."""

    job_id: str
    nodes: tuple[str, ...]
    gpus: int | None = None
    tasks_here: int = 1


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation of a process with this environment; None outside of one. Raises InputError for
    a list of nodes that cannot be read."""
    job_id = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID")
    listed = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not job_id or not listed:
        return None
    return Allocation(
        job_id=job_id,
        nodes=tuple(expand_node_list(listed)),
        gpus=_number(environment, "SLURM_GPUS_ON_NODE"),
        tasks_here=_number(environment, "SLURM_STEP_NUM_TASKS") or 1,
    )


def is_in_allocation(environment: Mapping[str, str], nodes: int) -> bool:
    """Whether a plan of so many nodes is by default for the allocation around this process: it has
    several nodes, or this process runs outside of them (below salloc on a login host). A plan of
    one node, on a node of the allocation, runs there as on any host."""
    has_allocation = bool(environment.get("SLURM_JOB_ID") and environment.get("SLURM_JOB_NODELIST"))
    return has_allocation and (nodes > 1 or "SLURMD_NODENAME" not in environment)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def allocation_issues(allocation: Allocation, nodes: int, gpus: int) -> Iterator[Issue]:
    """Yield the issues of running a plan there with so many nodes, each with so many GPUs (0 on CPU)."""
    present, job = len(allocation.nodes), f"job {allocation.job_id}"
    if nodes > present:
        message = f"the plan has {plural(nodes, 'node')}, but {job} has {present}"
        hint = f"allocate {nodes} (salloc -N {nodes}), or plan for {present}: --nodes {present}"
        yield Issue("slurm-nodes", "cluster.nodes", message, hint)
    if allocation.gpus is not None and gpus > allocation.gpus:
        message = f"{plural(gpus, 'rank')} a node need as many GPUs, but {job} has {allocation.gpus} on this node"
        hint = f"allocate them (salloc --gpus-per-node={gpus}), or --gpus-per-node {allocation.gpus}"
        yield Issue("slurm-gpus", "cluster.gpus_per_node", message, hint)


def agents_step(
    allocation: Allocation, names: Sequence[str], agent: Sequence[str], options: Sequence[str] = ()
) -> list[str]:
    """The srun command that runs the command `agent` once on each of these nodes. options: further
    ones, which go first.

    --overlap lets it run together with a step that waits for it, such as an interactive shell. A
    task may use all CPUs that the job has on its node, since it starts several ranks: without
    --cpus-per-task a step gets them all, and --cpu-bind=none does not bind it to one of them. A
    task that fails does not end the others: the launcher decides about that.
    """
    nodes = len(names)
    return [
        "srun",
        *options,
        f"--jobid={allocation.job_id}",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(names)}",
        "--overlap",
        "--cpu-bind=none",
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--unbuffered",
        "--quiet",
        *agent,
    ]


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun, without the variables that it would read as options."""
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT or not name.startswith(("SLURM_", "SRUN_", "SLURMD_"))
    }


# ---------------------------------------------------------------- lists of nodes


def expand_node_list(text: str) -> list[str]:
    """The names in a list of nodes, in its order, as `scontrol show hostnames` prints them. Raises
    InputError for other text and for more than MOST_NODES names.

    >>> expand_node_list("gpu[003-004,7],rack[0-1]n[1-2]")
    ['gpu003', 'gpu004', 'gpu7', 'rack0n1', 'rack0n2', 'rack1n1', 'rack1n2']
    """
    entries = ENTRY.findall(text)
    if not entries or ENTRY.sub("", text) != "," * (len(entries) - 1):
        raise _unreadable(text)
    names: list[str] = []
    for entry in entries:
        parts = [[plain] if plain else _numbers(bracket, text) for bracket, plain in PART.findall(entry)]
        if len(names) + prod(map(len, parts)) > MOST_NODES:
            raise _too_many(text)
        names += map("".join, product(*parts))
    return names


def _numbers(bracket: str, text: str) -> list[str]:
    """`003-005,7` as 003, 004, 005, 7: a range has the width of its first number."""
    numbers: list[str] = []
    for entry in bracket.split(","):
        match = RANGE.fullmatch(entry)
        if match is None:
            raise _unreadable(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise _unreadable(text)
        if last - first >= MOST_NODES:
            raise _too_many(text)
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _unreadable(text: str) -> InputError:
    message = f"{text[:80]!r} is not a list of nodes"
    return InputError.of("node-list", "node list", message, "write it as gpu[003-005,7],login1")


def _too_many(text: str) -> InputError:
    message = f"{text[:80]!r} names more than {MOST_NODES:,} nodes"
    return InputError.of("node-list-long", "node list", message, "name fewer nodes")


def address_command(names: Sequence[str]) -> list[str]:
    """Return the command that prints the input of `read_addresses`."""
    return ["sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N|%o"]


def read_addresses(listing: str) -> dict[str, str]:
    """The network address of each node by its name: NodeAddr of Slurm's configuration, by which
    Slurm itself reaches it. A name need not be one that hosts can resolve."""
    pairs = (line.partition("|") for line in listing.splitlines())
    return {name: address for name, between, address in pairs if between and address}
