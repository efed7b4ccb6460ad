"""`--on slurm`: node agents in the allocation that this process runs in, by one srun step.

Without an allocation there is nothing to run on: `--submit` hands the run to sbatch
(submission.py), and salloc gets one. Inside of one, which may be a batch script, a shell
below salloc or a step of one task, `srun` starts an agent on each of the first nodes, as many as
the plan has and, as spare hosts, launch.spare_nodes more. A node is known by its name
(SLURMD_NODENAME), so that its rank in the plan is its index in the allocation's list, however srun
numbers its tasks.

The agents connect to this process. At the end RUN/nodes/lost says which nodes of the plan were lost
or are blamed for too many failures (records/rundir/blamed.py), so that the batch script knows that another
allocation may help, and RUN/nodes/excluded lists the latter, which a requeue leaves out.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mpctl.core.errors import Issue, MpctlError
from mpctl.core.units import plural
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.run.clusters.backend import OnEvent, job_here
from mpctl.run.clusters.slurm.allocation import (
    Allocation,
    address_command,
    agents_step,
    allocation_issues,
    find_allocation,
    read_addresses,
    step_environment,
)
from mpctl.run.clusters.slurm.commands import slurm_output
from mpctl.run.clusters.slurm.containers import container_issues, step_options, wrapped
from mpctl.run.hosts.checks import named_device, unshared_issue
from mpctl.run.hosts.network import addresses_towards, own_addresses
from mpctl.run.launch.cluster import Cluster
from mpctl.run.launch.control.cluster import AgentCluster, AgentOrder, agent_cluster
from mpctl.run.launch.diagnose import end_of
from mpctl.run.launch.launch_plan import HostCommand, LaunchPlan
from mpctl.run.launch.node.processes import end_processes
from mpctl.spec.job import JobSpec

REQUEUES = "MPCTL_REQUEUES"
"""Environment variable set if the batch script requeues the job after hosts fail."""
END_SECONDS, KILL_SECONDS = 10.0, 5.0
MOST_SAID, READ_SECONDS = 1 << 22, 1.0


class SlurmBackend:
    """Node agents in an allocation. allocation: None outside of one."""

    name = "slurm"

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        self.job, self.environment = job, environment
        self.allocation = find_allocation(environment)
        self.job_id = job_here(self.name, environment) if self.allocation else None

    def check(self, plan: Plan) -> list[Issue]:
        nodes = plan.job.cluster.nodes
        if self.allocation is None:
            hint = f"add --submit to queue a batch job, or get one: salloc -N {nodes} ... mpctl launch"
            return [Issue("no-allocation", "--on", "not inside of a Slurm allocation", hint)]
        if (tasks := self.allocation.tasks_here) > 1:
            message = f"this process is one of {tasks} tasks of a step, and each would launch a run"
            hint = "start one (srun -N1 -n1 --overlap), or let the tasks be the nodes: --on torchrun"
            return [Issue("slurm-step", "--on", message, hint)]
        return [*allocation_issues(self.allocation, nodes, _gpus(plan)), *container_issues(self.job.launch.slurm)]

    @contextmanager
    def connect(self, plan: Plan, run: RunDir, on_event: OnEvent) -> Iterator[Cluster]:
        allocation, nodes = self._allocation(), plan.job.cluster.nodes
        names, spares = self._names(plan), plan.job.launch.spare_nodes
        if len(names) < nodes + spares:
            there = plural(len(names) - nodes, "spare host")
            on_event(f"launch.spare_nodes is {spares}, but the allocation has {there}")
        addresses, log = launcher_addresses(names), run.nodes / "srun.log"
        run.lost_hosts.unlink(missing_ok=True)
        with agent_cluster(
            names,
            run,
            lambda o: SlurmStep(
                allocation, names, _agent(o, addresses, self.job), self.environment, log, step_options(self.job, o.run)
            ),
            on_event,
            patience=plan.job.launch.start_seconds,
            silence=plan.job.launch.silence_seconds,
            addresses=addresses,
            nodes=nodes,
            exclude_after=plan.job.launch.most_blames,
            may_move=REQUEUES in self.environment,
        ) as cluster:
            try:
                yield cluster
            finally:
                _report_hosts(run, cluster)

    def commands(self, plan: LaunchPlan) -> list[HostCommand]:
        """The srun command, which starts the agents of all nodes; a launch chooses its port and
        key."""
        allocation, names = self._allocation(), self._names(plan)
        order = AgentOrder.of(plan.run, seconds=plan.job.launch.start_seconds)
        agent = _agent(order, launcher_addresses(names), self.job)
        step = agents_step(allocation, names, agent, step_options(self.job, order.run))
        return [HostCommand(0, names[0], tuple(step))]

    def _names(self, plan: Plan | LaunchPlan) -> tuple[str, ...]:
        """The nodes that agents are started on: those of the plan, then spare hosts."""
        job = plan.job
        return self._allocation().nodes[: job.cluster.nodes + job.launch.spare_nodes]

    def _allocation(self) -> Allocation:
        if self.allocation is None:
            raise MpctlError("not inside of a Slurm allocation")
        return self.allocation


def _report_hosts(run: RunDir, cluster: AgentCluster) -> None:
    """Write RUN/nodes/lost and RUN/nodes/excluded for the batch script (script.py)."""
    said = run.excluded.read_text("utf-8", "replace").splitlines() if run.excluded.exists() else []
    excluded = sorted({*cluster.excluded, *filter(cluster.blames.is_excluded, said)})
    lost = [f"{link.name} was lost" for link in cluster.links if not link.is_ready]
    bad = [f"{link.name} failed too often" for link in cluster.links if link.name in excluded]
    for path, lines in ((run.lost_hosts, [*lost, *bad]), (run.excluded, excluded)):
        if lines:
            path.write_text("\n".join(lines) + "\n", "utf-8")
        else:
            path.unlink(missing_ok=True)


@dataclass
class SlurmStep:
    """The srun processes that run the agents of a launch: one for all nodes, one more for those
    that are started again after they were lost.

    names: of the nodes; agent: the command of an agent; environment: of the launcher; log: for the
    output of srun and of the agents; options: further ones of srun; steps: the srun that started
    the agent of each node last; begins: the size of the log before it; unshared: nodes that cannot
    read the run directory, by the log; next_read: when it is read again, by time.monotonic(): its
    file system is shared.
    """

    allocation: Allocation
    names: Sequence[str]
    agent: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    options: Sequence[str] = ()
    steps: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)
    next_read: float = 0.0
    unshared: dict[int, Issue] = field(default_factory=dict)

    def start(self, nodes: Sequence[int]) -> None:
        chosen = [self.names[node] for node in nodes]
        with self.log.open("ab") as log:
            before = log.tell()
            srun = subprocess.Popen(
                agents_step(self.allocation, chosen, self.agent, self.options),
                env=step_environment(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the launcher, which ends the agents
            )
        self.steps |= dict.fromkeys(nodes, srun)
        self.begins |= dict.fromkeys(nodes, before)
        self.unshared = {node: issue for node, issue in self.unshared.items() if node not in nodes}

    def failures(self) -> dict[int, Issue]:
        """Return the nodes whose agent cannot read the run directory or whose srun has ended, with the end of its
        output."""
        if time.monotonic() >= self.next_read:
            self.next_read = time.monotonic() + READ_SECONDS
            self.unshared = dict(self._find_unshared())
        return self._ended() | self.unshared

    def _find_unshared(self) -> Iterator[tuple[int, Issue]]:
        """Nodes whose last started agent reported that it cannot read the key."""
        nodes = {self.names[node]: node for node in self.steps}
        first = min(self.begins.values(), default=0)
        at, said = first, b""
        with suppress(OSError), self.log.open("rb") as stream:
            stream.seek(first)
            said = stream.read(MOST_SAID)
        for line in said.splitlines(keepends=True):
            text = line.decode("utf-8", errors="replace")
            node = nodes.get(text.partition(" ")[0])
            begin, at = at, at + len(line)
            if node is None or begin < self.begins[node]:
                continue  # not an agent's line, or an earlier agent's
            if issue := unshared_issue(self.names[node], text):
                yield node, issue

    def _ended(self) -> dict[int, Issue]:
        said = [line.strip() for line in end_of(self.log).splitlines() if line.strip()]
        last = said[-1] if said else "it wrote nothing"
        return {
            node: Issue(
                "srun-ended", self.names[node], f"srun ended with code {srun.returncode}: {last}", f"see {self.log}"
            )
            for node, srun in self.steps.items()
            if srun.poll() is not None
        }

    def end(self) -> None:
        """Wait until each srun has ended, as it does once its agents have; one that has not is
        terminated, which ends its step."""
        end_processes([*{*self.steps.values()}], END_SECONDS, KILL_SECONDS)


def launcher_addresses(names: Sequence[str]) -> list[str]:
    """Return the addresses of this host for the nodes; empty if unknown. The first is towards the last node, since this
    host may be one of the others."""
    known: Mapping[str, str] = {}
    with suppress(MpctlError):
        known = read_addresses(slurm_output(address_command(names)))
    return addresses_towards([known.get(name, name) for name in reversed(names)])


def _agent(order: AgentOrder, addresses: Sequence[str], job: JobSpec) -> list[str]:
    """The command of an agent, in the job's container. addresses: those of the launcher; the nodes
    try all addresses of this host where it is not known which lead here."""
    listed = ",".join(addresses or own_addresses())
    return wrapped(job, order.run, sys.executable, ["-P", *order.arguments(listed)])


def _gpus(plan: Plan) -> int:
    """GPUs that the plan needs on each node; 0 if it runs on CPU, or where that is not decided
    before the hosts are examined."""
    return (plan.job.cluster.gpus_per_node or 0) if named_device(plan.job) == "cuda" else 0
