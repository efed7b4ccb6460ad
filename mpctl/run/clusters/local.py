"""`--on local`: all ranks run on this host, below this process, whatever nodes the plan has.

Nodes of the plan are simulated on CPU (run/hosts/checks.py refuses them on GPUs). No node agent is
needed: torchrun is a child of the launcher.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mpctl.core.errors import Issue
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.run.clusters.backend import OnEvent
from mpctl.run.hosts.checks import Device, host_issues
from mpctl.run.hosts.machine import HostFacts, host_facts
from mpctl.run.hosts.network import free_port
from mpctl.run.launch.attempt import AttemptState
from mpctl.run.launch.launch_plan import HostCommand, LaunchPlan, first_environment
from mpctl.run.launch.node.torchrun import NodeStart, NodeTorchrun, SpareTorchrun, WaitingTorchrun
from mpctl.spec.job import JobSpec


class LocalAttempt:
    """One torchrun, a child of this process. address: the rendezvous of its ranks."""

    def __init__(self, run: RunDir, start: NodeStart, spare: SpareTorchrun) -> None:
        self.address = f"{start.address}:{start.port}"
        self.node = NodeTorchrun(run, start, spare)
        self.poll, self.stacks = self.node.poll, self.node.stacks
        self.request_stop = self.node.request_stop

    def snapshot(self) -> AttemptState:
        return AttemptState((self.node.snapshot(),))

    def end(self) -> AttemptState:
        return AttemptState((self.node.end(),))


@dataclass(frozen=True)
class LocalCluster:
    """This host alone. spare: the process for the next attempt."""

    run: RunDir
    hosts: Sequence[HostFacts]
    spare: SpareTorchrun = field(default_factory=SpareTorchrun)

    @classmethod
    def of(cls, run: RunDir) -> LocalCluster:
        return cls(run, (host_facts(),))

    def check(self, plan: Plan, device: Device) -> list[Issue]:
        return list(host_issues(plan, self.hosts[0].machine, device))

    def blame(self, host: str, error: str) -> None:
        """There is no other host."""

    def recover(self, least: int, is_stopped: Callable[[], bool]) -> list[Issue]:
        return []

    def has_returned(self) -> bool:
        return False

    def start(self, plan: LaunchPlan) -> LocalAttempt:
        """Start all ranks. Raises RunFailed when they cannot connect at the loopback address."""
        start = plan.local_start(free_port(plan.world_size))
        return LocalAttempt(plan.run, start, self.spare)


class LocalBackend:
    """All ranks on this host."""

    name = "local"
    job_id = None

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        """Neither argument is used."""

    def check(self, plan: Plan) -> list[Issue]:
        return []

    @contextmanager
    def connect(self, plan: Plan, run: RunDir, on_event: OnEvent) -> Iterator[LocalCluster]:
        """This host; torchrun imports torch while the launch is checked and set up."""
        facts = host_facts()
        environment = first_environment(plan, run, facts.machine)
        spare = SpareTorchrun(WaitingTorchrun(run.path, environment))
        try:
            yield LocalCluster(run, (facts,), spare)
        finally:
            spare.end()

    def commands(self, plan: LaunchPlan) -> list[HostCommand]:
        command = tuple(plan.command(free_port()))
        return [HostCommand(0, socket.gethostname(), command, plan.local_env)]
