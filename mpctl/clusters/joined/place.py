"""What the launcher of a joined world asks every process of it: its numbers, and what it may use.

Each process knows its own numbers alone, so the launcher collects them to see whether all nodes
have as many processes and these are numbered node by node. A program that starts a process a rank
may also give each process cores and a GPU of its own; what the processes of a host have together is
what the host has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mpctl.clusters.joined.world import JoinedWorld, require_world
from mpctl.cores import usable_cores
from mpctl.hosts.machine import HostFacts


@dataclass(frozen=True)
class JoinedProcess:
    """One process of a joined world. cores: the processor cores that it may use."""

    world: JoinedWorld
    cores: tuple[int, ...]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> JoinedProcess:
        """A process from its document. Raises ValueError or TypeError when it is none."""
        return cls(JoinedWorld(**document["world"]), tuple(document["cores"]))


def describe_process() -> dict[str, Any]:
    """This process, as JSON. Raises InputError when it is not part of a world."""
    return {"world": asdict(require_world(os.environ)), "cores": usable_cores()}


def host_of(processes: Sequence[JoinedProcess], facts: Sequence[HostFacts]) -> HostFacts:
    """The facts of one host, from those of the processes on it.

    A process that sees several GPUs sees all of the host; where each sees one, these are different
    ones.
    """
    machines = [fact.machine for fact in facts]
    most = max(machine.gpus for machine in machines)
    machine = replace(
        machines[0],
        cores=len({core for process in processes for core in process.cores}),
        gpus=most if most > 1 else sum(machine.gpus for machine in machines),
        memory_bytes=min(machine.memory_bytes for machine in machines),
    )
    return replace(facts[0], machine=machine)
