"""`--on torchrun`: a world that another program started; this process is one of its processes.

The first process of the world runs `mpctl launch` as everywhere else, and this is its backend.
Every other process follows it (joined/agent.py) and never gets here. The world has to be the one
that the plan needs (joined/checks.py).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mpctl.clusters.backend import JOB_VARIABLES, OnEvent
from mpctl.clusters.joined.checks import world_issues
from mpctl.clusters.joined.cluster import JoinedAgents, JoinedCluster
from mpctl.clusters.joined.meeting import listening_addresses
from mpctl.clusters.joined.rank_process import rank_variables
from mpctl.clusters.joined.world import require_world
from mpctl.errors import Issue
from mpctl.launch.control.cluster import agent_cluster
from mpctl.launch.launch_plan import HostCommand, LaunchPlan
from mpctl.launch.node.torchrun import NodeStart, torchrun_command
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.spec.job import JobSpec

WORLD_NAMES = (JOB_VARIABLES["kubernetes"], JOB_VARIABLES["slurm"], "TORCHELASTIC_RUN_ID")
"""Environment variables with a name for the whole world, the outermost first."""


class TorchrunBackend:
    """The processes of a world that exists already."""

    name = "torchrun"

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        """Read the world from the environment. Raises InputError when it says of none."""
        self.environment = environment
        self.world = require_world(environment)
        self.seconds = job.launch.start_seconds
        named = (environment.get(name, "none") for name in WORLD_NAMES)
        self.job_id = next((name for name in named if name != "none"), None)

    def check(self, plan: Plan) -> list[Issue]:
        """Every way in which the world is not the planned one."""
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
            patience=self.seconds,
            addresses=listening_addresses(self.world.nodes, self.environment),
        ) as cluster:
            yield JoinedCluster.of(cluster)

    def commands(self, plan: LaunchPlan) -> list[HostCommand]:
        """What each process of the world starts; address and port are chosen for each attempt."""
        return [self._command(plan, process) for process in range(self.world.size)]

    def _command(self, plan: LaunchPlan, process: int) -> HostCommand:
        world, host = self.world, f"process {process}"
        ranks = plan.world_size // world.size
        start = NodeStart(process, world.size, ranks, socket.gethostname(), 29500, plan.env)
        if world.level == "node":
            command = tuple(torchrun_command(plan.run.path, start))
            return HostCommand(process, host, command, plan.env)
        worker = (sys.executable, "-m", "mpctl.runtime.worker", str(plan.run.path.resolve()))
        node, local = divmod(process, world.per_node)
        return HostCommand(node, host, worker, rank_variables(start, local, {}))
