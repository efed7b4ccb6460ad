"""`--on torchrun`: a world that another program started; this process is one of its processes.

The first process of the world runs `mpctl launch` as everywhere else, and this is its backend.
Every other process follows it (agent.py) and never gets here. The world has to be the one that the
plan needs (world.py).

Every process, the first one's own child included, connects to the launcher as a node agent does:
with a process a node it runs torchrun there, with a process a rank the worker of that rank alone.
The supervisor is that of every other launch, so that ranks are watched, diagnosed and restarted in
the same way, although another program started the processes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain

from mpctl.core.errors import Issue, RunFailed
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import write_hosts
from mpctl.run.clusters.backend import JOB_VARIABLES, OnEvent
from mpctl.run.clusters.torchrun.agent import rank_command, rank_variables
from mpctl.run.clusters.torchrun.meeting import Meeting, listening_addresses, write_meeting
from mpctl.run.clusters.torchrun.world import JoinedProcess, JoinedWorld, host_of, require_world, world_issues
from mpctl.run.hosts.checks import Device, cluster_host_issues, differing_hosts
from mpctl.run.hosts.machine import HostFacts
from mpctl.run.launch.cluster import Attempt
from mpctl.run.launch.control.cluster import AgentCluster, AgentOrder, agent_cluster
from mpctl.run.launch.launch_plan import HostCommand, LaunchPlan
from mpctl.run.launch.node.processes import kill_tree
from mpctl.run.launch.node.torchrun import torchrun_command
from mpctl.spec.job import JobSpec

WORLD_NAMES = (JOB_VARIABLES["kubernetes"], JOB_VARIABLES["slurm"], "TORCHELASTIC_RUN_ID")
"""Environment variables with an id of the world, the outermost first."""


class TorchrunBackend:
    """The processes of a world that exists already."""

    name = "torchrun"

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        """Read the world from the environment. Raises InputError without one."""
        self.environment = environment
        self.world = require_world(environment)
        self.launch = job.launch
        named = (environment.get(name, "none") for name in WORLD_NAMES)
        self.job_id = next((name for name in named if name != "none"), None)

    def check(self, plan: Plan) -> list[Issue]:
        return world_issues(self.world, plan.job)

    @contextmanager
    def connect(self, plan: Plan, run: RunDir, on_event: OnEvent) -> Iterator[JoinedCluster]:
        """All processes of the world, connected to this one. Raises InputError when one does not
        come."""
        names = [f"process {number}" for number in range(self.world.size)]
        with agent_cluster(
            names,
            run,
            lambda order: JoinedAgents(order, self.world, self.environment),
            on_event,
            patience=self.launch.start_seconds,
            silence=self.launch.silence_seconds,
            addresses=listening_addresses(self.world.nodes, self.environment),
        ) as cluster:
            yield JoinedCluster.of(cluster)

    def commands(self, plan: LaunchPlan) -> list[HostCommand]:
        return [self._command(plan, process) for process in range(self.world.size)]

    def _command(self, plan: LaunchPlan, process: int) -> HostCommand:
        world, host = self.world, f"process {process}"
        ranks = plan.world_size // world.size
        start = plan.node_start(process, world.size, ranks, socket.gethostname(), 29500)
        if world.level == "node":
            command = tuple(torchrun_command(plan.run.path, start))
            return HostCommand(process, host, command, plan.env)
        worker = tuple(rank_command(plan.run, start))
        node, local = divmod(process, world.per_node)
        return HostCommand(node, host, worker, rank_variables(start, local, {}))


ANSWER_SECONDS = 20.0


@dataclass
class JoinedAgents:
    """Starts the agent of the first process and publishes its address for the others, which already
    run. An AgentStarter (control/cluster.py)."""

    order: AgentOrder
    world: JoinedWorld
    environment: Mapping[str, str]
    own: subprocess.Popen[bytes] | None = field(default=None)

    def start(self, nodes: Sequence[int]) -> None:
        if 0 in nodes:
            arguments = self.order.arguments("127.0.0.1", 0)
            arguments[1] = "mpctl.run.clusters.torchrun.agent"
            # In a separate session: signals to the processes of the world are for the launcher.
            self.own = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.DEVNULL, start_new_session=True)
        meeting = Meeting.here(self.order.port, self.order.key, self.environment)
        write_meeting(self.order.run / "nodes" / "meeting.json", meeting)

    def failures(self) -> dict[int, Issue]:
        """The first process's agent, when it has ended."""
        code = None if self.own is None else self.own.poll()
        if code is None:
            return {}
        return {0: Issue("agent-ended", "node 0", f"its node agent ended with code {code}")}

    def end(self) -> None:
        """Remove the meeting; the agents have been sent that the launch is over."""
        (self.order.run / "nodes" / "meeting.json").unlink(missing_ok=True)
        if self.own is None:
            return
        try:
            self.own.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            kill_tree(self.own)


@dataclass(frozen=True)
class JoinedCluster:
    """A fully connected joined world. processes: in their order."""

    cluster: AgentCluster
    processes: Sequence[JoinedProcess]

    @classmethod
    def of(cls, cluster: AgentCluster) -> JoinedCluster:
        """Ask every process for its numbers. Raises RunFailed when one does not answer."""
        for link in cluster.links:
            if link.hello is not None:
                link.name = link.hello.facts.name
        asked = [cluster.server.request(link.node, "joined_process") for link in cluster.links]
        try:
            answers = [answer.result(ANSWER_SECONDS) for answer in asked]
            return cls(cluster, [JoinedProcess.of(answer) for answer in answers])
        except (RuntimeError, TimeoutError, KeyError, TypeError) as error:
            message = f"a process of the world does not say which one it is: {error}"
            raise RunFailed(message) from None

    @property
    def by_node(self) -> list[list[int]]:
        """The numbers of the processes on each node, in order of nodes."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for number, process in enumerate(self.processes):
            nodes[process.world.node].append(number)
        return [nodes[node] for node in sorted(nodes)]

    @property
    def hosts(self) -> Sequence[HostFacts]:
        facts = self.cluster.hosts
        return [host_of([self.processes[n] for n in numbers], [facts[n] for n in numbers]) for numbers in self.by_node]

    def check(self, plan: Plan, device: Device) -> list[Issue]:
        worlds = [world_issues(process.world, plan.job) for process in self.processes]
        if issues := list(chain.from_iterable(worlds)):
            return issues
        return [
            *differing_hosts(self.cluster.hosts),
            *self._scattered(),
            *cluster_host_issues(plan, self.hosts, device),
        ]

    def _scattered(self) -> list[Issue]:
        """Processes of one node that run on different hosts."""
        names = [fact.name for fact in self.cluster.hosts]
        return [
            Issue(
                "world-matches-plan",
                f"node {node}",
                f"its processes run on different hosts: {', '.join(sorted(hosts))}",
                "start the processes of a node on one host",
            )
            for node, numbers in enumerate(self.by_node)
            if len(hosts := {names[n] for n in numbers}) > 1
        ]

    def blame(self, host: str, error: str) -> None:
        """Count it, for `mpctl status`; the program that started the world chooses its hosts."""
        self.cluster.blame(host, error)

    def recover(self, least: int, is_stopped: Callable[[], bool]) -> list[Issue]:
        """Wait for processes that were lost; a reason for each that does not come back. The program
        that started the world sets its size, so that an elastic run needs all of them, too."""
        return self.cluster.recover(len(self.processes), is_stopped)

    def has_returned(self) -> bool:
        return False

    def start(self, plan: LaunchPlan) -> Attempt:
        attempt = self.cluster.start(plan)
        with suppress(OSError):  # by host, also where each process of the world is a rank
            names = [host.name for host in self.hosts]
            write_hosts(self.cluster.run.hosts, names, plan.world_size // len(names))
        return attempt
