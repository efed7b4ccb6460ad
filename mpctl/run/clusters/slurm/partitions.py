"""Partitions, nodes and time limits as sinfo lists them, and whether one of them can run a plan.

sbatch accepts a job for more nodes than a partition has, and the job then waits for ever. The
request is therefore compared with sinfo's listing before anything is submitted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import bytes_text, plural
from mpctl.run.clusters.slurm.commands import slurm_output

UNLIMITED = {"infinite", "unlimited", "-1"}
WITH_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
WITHOUT_DAYS = re.compile(r"(?:(\d+):)??(\d+)(?::(\d+))?")


def time_limit_seconds(text: str, where: str = "launch.slurm.time") -> float:
    """Seconds of a time limit, infinity for `UNLIMITED`. Raises InputError for other text. sbatch
    reads minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds; sinfo and squeue print the last forms.

    >>> time_limit_seconds("90"), time_limit_seconds("1-12:30")
    (5400.0, 131400.0)
    """
    if text.lower() in UNLIMITED:
        return inf
    if match := WITH_DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if match := WITHOUT_DAYS.fullmatch(text):
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float((hours * 60 + minutes) * 60 + seconds)
    hint = "write it as sbatch does: 30 (minutes), 12:00:00 or 2-00:00:00"
    raise InputError.of("slurm-time", where, f"{text!r} is not a time limit", hint)


def time_limit_text(seconds: float) -> str:
    """`131400` -> `1-12:30:00`, `5400` -> `1:30:00`; infinity -> `unlimited`."""
    if seconds == inf:
        return "unlimited"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}"
    return f"{days}-{clock}" if days else clock


SINFO = ("sinfo", "--noheader", "--exact", "--format=%P|%a|%l|%s|%D|%T|%c|%m|%G|%N")
"""Command that prints the input of `read_partitions`: a line for all equal nodes of a partition, with its name,
availability, time limit and nodes of a job, then the number of these nodes, their state, CPUs, megabytes, devices and
names."""

GPU = re.compile(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)(?:\([^)]*\))?")
UNUSABLE = re.compile(r"down|drain|fail|inval|unknown|error|future|maint|perfctrs|reboot", re.I)
"""States of a node that runs no job now; `allocated`, `mixed`, `idle`, `planned`, `completing` and
the states of nodes that are powered up on demand are not among them."""


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of a partition. cpus, gpus, memory_mb: of each of them; is_usable: whether they
    take jobs, now or once their current jobs have ended; names: Slurm's list of them."""

    nodes: int
    cpus: int
    gpus: int
    memory_mb: int
    is_usable: bool
    names: str


@dataclass(frozen=True)
class Partition:
    """A partition. time_limit: the longest that it allows, seconds, infinity without a bound;
    most_nodes: the most that one job may have, infinity without a bound."""

    name: str
    is_default: bool
    is_up: bool
    time_limit: float
    most_nodes: float
    groups: tuple[NodeGroup, ...]


@dataclass(frozen=True)
class NodeRequest:
    """Resources that a job requests from Slurm. gpus, cpus, memory_bytes: per node, 0 for any; partition: None for the
    default one; seconds: the time limit, None for the partition's."""

    nodes: int
    gpus: int
    cpus: int
    memory_bytes: int = 0
    partition: str | None = None
    seconds: float | None = None


def find_partitions() -> list[Partition]:
    """All partitions of the cluster. Raises InputError without Slurm, RunFailed when it does not
    answer."""
    return read_partitions(slurm_output(SINFO))


def read_partitions(listing: str) -> list[Partition]:
    """The partitions in the output of `SINFO`, in its order. Raises InputError for a line that is
    not of its form."""
    partitions: dict[str, Partition] = {}
    for line in listing.splitlines():
        partition = _partition(line)
        before = partitions.get(partition.name)
        groups = (*before.groups, *partition.groups) if before else partition.groups
        partitions[partition.name] = replace(partition, groups=groups)
    return list(partitions.values())


def _partition(line: str) -> Partition:
    """One line: a partition with the one group of nodes that the line is about."""
    try:
        name, up, limit, size, nodes, state, cpus, memory, gres, names = line.split("|")
        group = NodeGroup(
            nodes=int(nodes),
            cpus=_number(cpus),
            gpus=sum(int(count) for count in GPU.findall(gres)),
            memory_mb=_number(memory),
            is_usable=not UNUSABLE.search(state),
            names=names,
        )
        seconds = time_limit_seconds(limit, "sinfo")
        most = size.rpartition("-")[2]
        most_nodes = float(most) if most.isdecimal() else inf
    except ValueError:
        message = f"cannot read {line!r} in the output of sinfo"
        raise InputError.of("sinfo", "sinfo", message, f"run: {' '.join(SINFO)}") from None
    is_default, name = name.endswith("*"), name.rstrip("*")
    return Partition(name, is_default, up == "up", seconds, most_nodes, (group,))


def _number(text: str) -> int:
    """sinfo marks the smallest of several values by a plus: `64+`."""
    return int(text.rstrip("+"))


def chosen_partition(partitions: Sequence[Partition], name: str | None) -> Partition | None:
    """The partition of this name, the default one for None; None if it does not exist."""
    fits = (p for p in partitions if (p.is_default if name is None else p.name == name))
    return next(fits, None)


def request_issues(partitions: Sequence[Partition], request: NodeRequest) -> Iterator[Issue]:
    """Yield the reasons why Slurm would refuse a job or let it wait for ever."""
    partition = chosen_partition(partitions, request.partition)
    if partition is None:
        yield _no_partition(partitions, request)
        return
    others = _others(partitions, request, partition)
    if not partition.is_up:
        message = f"partition {partition.name!r} is not up"
        yield Issue("slurm-partition-down", "launch.slurm.partition", message, others)
    yield from _node_issues(partition, request, others)
    if request.seconds is not None and request.seconds > partition.time_limit:
        limit = time_limit_text(partition.time_limit)
        message = f"{time_limit_text(request.seconds)}, but partition {partition.name!r} allows {limit}"
        yield Issue("slurm-time", "launch.slurm.time", message, f"use at most {limit}")


def _no_partition(partitions: Sequence[Partition], request: NodeRequest) -> Issue:
    names = ", ".join(p.name for p in partitions) or "none"
    if request.partition is None:
        message = f"Slurm has no default partition; it has {names}"
    else:
        message = f"Slurm has no partition {request.partition!r}; it has {names}"
    hint = "name one of them: --set launch.slurm.partition=NAME"
    return Issue("slurm-partition", "launch.slurm.partition", message, hint)


def _node_issues(partition: Partition, request: NodeRequest, others: str) -> Iterator[Issue]:
    """Issues with the number of nodes that have enough GPUs and CPUs, and with its limit."""
    name, where = partition.name, "cluster.nodes"
    suitable = [group for group in partition.groups if _suits(group, request)]
    present = sum(group.nodes for group in suitable)
    usable = sum(group.nodes for group in suitable if group.is_usable)
    if request.nodes > partition.most_nodes:
        message = (
            f"{plural(request.nodes, 'node')}, but partition {name!r} allows a job at most {partition.most_nodes:.0f}"
        )
        yield Issue("slurm-nodes", where, message, others)
    if request.nodes > usable:
        most = _most(partition)
        away = f" ({present - usable} more are down or drained)" if present > usable else ""
        each = _each(request.gpus, request.cpus, request.memory_bytes)
        message = (
            f"{plural(request.nodes, 'node')} with {each} each, but partition {name!r} has "
            f"{usable} such{away}; it has {most}"
        )
        yield Issue("slurm-nodes", where, message, others)


def _suits(group: NodeGroup, request: NodeRequest) -> bool:
    """Whether a node meets the request. A cluster that does not count memory reports 1 MB."""
    has_memory = group.memory_mb <= 1 or group.memory_mb * 2**20 >= request.memory_bytes
    return group.gpus >= request.gpus and group.cpus >= request.cpus and has_memory


def _most(partition: Partition) -> str:
    """The nodes of a partition: `8 nodes with 4 GPUs, 64 CPUs, 512.0 GiB; 2 nodes with 64 CPUs`."""
    counts: Counter[str] = Counter()
    for group in partition.groups:
        counts[_each(group.gpus, group.cpus, group.memory_mb * 2**20)] += group.nodes
    words = [f"{plural(count, 'node')} with {each}" for each, count in counts.items() if count]
    return "; ".join(words) or "no node"


def _each(gpus: int, cpus: int, memory: int) -> str:
    parts = [plural(gpus, "GPU")] if gpus else []
    parts += [plural(cpus, "CPU")] if cpus else []
    parts += [bytes_text(memory)] if memory > 2**20 else []
    return ", ".join(parts) or "nothing"


def _others(partitions: Iterable[Partition], request: NodeRequest, chosen: Partition) -> str:
    """Return the fix: partitions that can run the job, or a smaller job."""
    able = [
        p.name
        for p in partitions
        if p is not chosen and p.is_up and request.nodes <= min(p.most_nodes, _usable(p, request))
    ]
    if able:
        return f"use --set launch.slurm.partition={' or '.join(able)}"
    return "plan for fewer nodes (--nodes), or fewer ranks a node (--gpus-per-node)"


def _usable(partition: Partition, request: NodeRequest) -> int:
    groups = partition.groups
    return sum(group.nodes for group in groups if group.is_usable and _suits(group, request))
