"""The hosts of a launch, each with a node agent, as the supervisor sees them, and attempts on them.

A backend provides the names of the hosts and starts an agent on each (AgentStarter). This module
has what all backends share: waiting for the agents, comparing their facts with the plan, running
attempts, reconnecting to lost hosts.

A host may come back unfit (a reboot without its mounts, another torch, fewer GPUs) or only for a
moment (ReturnPolicy). It is checked before the ranks of the others are stopped for it. After its
n-th loss a host is used again RETURN_SECONDS 2^(n-1) later, after the first at once; an unfit host
is asked again after as long, with n its refusals; at most LONGEST_SECONDS. A host lost a second
time at t may return at t + 40 s, after a third time at t + 80 s.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol

from mpctl.errors import InputError, Issue, RunFailed
from mpctl.hosts.checks import Device, cluster_host_issues, differing_hosts, doubled_hosts
from mpctl.hosts.machine import HostFacts
from mpctl.launch.attempt import AttemptPhase, AttemptState, NodeState
from mpctl.launch.control.messages import Command, Hello, Start, write_key
from mpctl.launch.control.server import ControlServer, HostLink
from mpctl.launch.launch_plan import LaunchPlan
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.rundir.launcher import write_hosts

RETURN_SECONDS, LONGEST_SECONDS = 20.0, 1800.0
POLL_SECONDS = 0.02
END_SECONDS = 15.0
STACKS_SECONDS = 2.0
OnEvent = Callable[[str], None]
IsStopped = Callable[[], bool]
RETURN_PATIENCE, FIRST_PAUSE, LONGEST_PAUSE = 15.0, 1.0, 15.0
"""How long a restart waits for hosts that the run can do without; the pauses between two tries."""
PORT_SECONDS = 10.0


@dataclass
class ReturnPolicy:
    """The lost hosts of a launch, by node. losses, refusals: how often each was lost and found
    unfit; not_before: when it may be used again, by time.monotonic()."""

    losses: Counter[int] = field(default_factory=Counter)
    refusals: Counter[int] = field(default_factory=Counter)
    not_before: dict[int, float] = field(default_factory=dict)

    def note_loss(self, node: int, now: float) -> float:
        """Count a loss; the seconds for which the host is not used from now on."""
        self.losses[node] += 1
        seconds = _pause(self.losses[node]) if self.losses[node] > 1 else 0.0
        self.not_before[node] = now + seconds
        return seconds

    def note_refusal(self, node: int, now: float) -> float:
        """Count a return as unfit; the seconds after which the host is asked again."""
        self.refusals[node] += 1
        seconds = _pause(self.refusals[node])
        self.not_before[node] = now + seconds
        return seconds

    def may_return(self, node: int, now: float) -> bool:
        return now >= self.not_before.get(node, now)


def _pause(times: int) -> float:
    return min(RETURN_SECONDS * 2.0 ** (times - 1), LONGEST_SECONDS)


@dataclass
class AgentAttempt:
    """torchrun on hosts of a cluster. links: of these hosts, in the order of nodes; address: the
    rendezvous of the ranks; failures: why the agent of a node did not start or has ended."""

    server: ControlServer
    links: Sequence[HostLink]
    number: int
    address: str
    failures: Callable[[], dict[int, Issue]]

    def poll(self) -> AttemptPhase:
        return self.snapshot().phase

    def snapshot(self) -> AttemptState:
        return AttemptState([self._state(node, link) for node, link in enumerate(self.links)])

    def request_stop(self) -> None:
        for link in self.links:
            self.server.send(link.node, Command("stop"))

    def end(self) -> AttemptState:
        """Have every host end its ranks, and wait until all that answer have."""
        self.server.broadcast(Command("end"))
        deadline = time.monotonic() + END_SECONDS
        while not (state := self.snapshot()).phase.is_over and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return state

    def stacks(self) -> dict[int, str]:
        answers = [self.server.request(link.node, "stacks") for link in self.links]
        deadline = time.monotonic() + STACKS_SECONDS
        stacks: dict[int, str] = {}
        for answer in answers:
            with suppress(RuntimeError, TimeoutError):
                of_host = answer.result(max(0.0, deadline - time.monotonic()))
                stacks |= {int(rank): str(text) for rank, text in of_host.items()}
        return stacks

    def _state(self, node: int, link: HostLink) -> NodeState:
        """What a host last reported; its failures at times of the launcher's clock."""
        state = link.reports.get(self.number, NodeState(node=node))
        shift = link.clock_shift
        failures = [failure | {"time": failure["time"] + shift} for failure in state.failures]
        return replace(state, host=link.name, lost=self._lost(link, state), failures=failures)

    def _lost(self, link: HostLink, state: NodeState) -> str:
        """A host whose ranks have ended is not lost to the attempt."""
        if state.code is not None:
            return ""
        failure = self.failures().get(link.node) if link.lost else None
        return f"{link.lost}: {failure.message}" if failure else link.lost


def never() -> bool:
    return False


class AgentStarter(Protocol):
    """How a backend starts node agents; the command of an agent is agent_arguments (below)."""

    def start(self, nodes: Sequence[int]) -> None:
        """Start the agents of these nodes; returns before they have connected."""

    def failures(self) -> dict[int, Issue]:
        """The nodes whose agent could not be started, or has ended, with the reason."""

    def end(self) -> None:
        """End whatever was started and still runs."""


@dataclass(frozen=True)
class AgentOrder:
    """The arguments of a node agent. run: the run directory, as an absolute path; key: the file
    there that it reads; port: of the control server, on the launcher's host."""

    run: Path
    key: Path
    port: int

    @classmethod
    def of(cls, run: RunDir, key: str = "key-ID", port: int = 0) -> AgentOrder:
        """key: the name of the file. A launch chooses key and port; the defaults are shown."""
        return cls(run.path.resolve(), run.nodes.resolve() / key, port)

    def arguments(self, address: str, node: int | None = None) -> list[str]:
        """The arguments of Python on the host. address: of the launcher, as that host can reach it;
        node: the host's index, where the launcher does not know the host by its name."""
        numbered = [] if node is None else [f"--node={node}"]
        connect = f"--connect={address}:{self.port}"
        module = ["-m", "mpctl.launch.node.agent"]
        return [*module, str(self.run), connect, f"--key={self.key}", *numbered]


@contextmanager
def agent_cluster(
    names: Sequence[str],
    run: RunDir,
    make_starter: Callable[[AgentOrder], AgentStarter],
    on_event: OnEvent,
    *,
    patience: float,
    addresses: Sequence[str] = (),
) -> Iterator[AgentCluster]:
    """The hosts `names`, in the order of the plan's nodes, each with a connected agent.

    patience: seconds without a new host after which the wait for agents ends. addresses: of this
    host, at which the hosts reach it; empty where that is not known. Raises InputError with a
    reason for each host that cannot be used. A directory that was made for this is removed
    again when no run was written there.
    """
    is_new = not run.is_occupied
    server = ControlServer(names)
    server.open(addresses)
    run.make()
    run.nodes.mkdir(mode=0o700, exist_ok=True)
    order = AgentOrder.of(run, f"key-{secrets.token_hex(4)}", server.port)
    write_key(order.key, server.key)
    starter = make_starter(order)
    cluster = AgentCluster(run, server, starter, on_event, patience)
    try:
        starter.start(range(len(names)))
        if issues := cluster.wait():
            raise InputError(issues)
        yield cluster
    finally:
        server.close()
        starter.end()
        order.key.unlink(missing_ok=True)
        if is_new and not run.job.exists():
            run.abandon()


@dataclass
class AgentCluster:
    """Hosts with a node agent each. attempts: how many were started; ranks: of each host; absent:
    nodes that an elastic run does without; next_try: when they are tried again, by
    time.monotonic(); returns: when each may be used; checked: what hosts were last checked for."""

    run: RunDir
    server: ControlServer
    starter: AgentStarter
    on_event: OnEvent
    patience: float
    attempts: int = 0
    ranks: int = 0
    absent: frozenset[int] = frozenset()
    next_try: float = 0.0
    returns: ReturnPolicy = field(default_factory=ReturnPolicy)
    checked: tuple[Plan, Device] | None = None

    @property
    def links(self) -> list[HostLink]:
        """The connection of each host of the next attempt, in the order of the plan's nodes."""
        return [link for link in self.server.links if link.node not in self.absent]

    @property
    def hellos(self) -> list[Hello]:
        """The hello messages of the agents. Raises RunFailed when one is not connected."""
        return [_hello(link) for link in self.links]

    @property
    def hosts(self) -> Sequence[HostFacts]:
        """The facts of each host, under the name that the backend gave it."""
        return [_facts(link) for link in self.links]

    def wait(self, patience: float | None = None, is_stopped: IsStopped = never) -> list[Issue]:
        """Wait for the agents of all hosts, at most `patience` seconds (of the cluster, when None)
        without a new one; an issue for each host that did not come."""
        patience = self.patience if patience is None else patience
        ready, deadline = -1, 0.0
        while True:
            missing = [link for link in self.links if not link.is_ready]
            if not missing:
                return []
            for link in missing:
                if link.lost:  # it came and went; a process of a joined world comes again
                    self.server.forget(link.node)
            if len(self.links) - len(missing) > ready:
                ready, deadline = len(self.links) - len(missing), time.monotonic() + patience
            failures = self.starter.failures()
            waiting = [link for link in missing if link.node not in failures]
            if not waiting or time.monotonic() > deadline or is_stopped():
                late = (
                    f"its node agent did not connect to port {self.server.port} of this host "
                    f"within {self.patience:g} s"
                )
                hint = (
                    "check that it can reach this one (firewall, interface), or raise "
                    "launch.start_seconds"
                )
                silent = [Issue("host-did-not-connect", w.name, late, hint) for w in waiting]
                return [*(failures[n] for n in sorted(failures)), *silent]
            time.sleep(POLL_SECONDS)

    def check(self, plan: Plan, device: Device) -> list[Issue]:
        """What the hosts lack to run the plan, and what differs between them."""
        self.checked = (plan, device)
        doubled = doubled_hosts(self.hosts) if device == "cuda" else []
        lacks = cluster_host_issues(plan, self.hosts, device)
        return [*doubled, *differing_hosts(self.hosts), *lacks]

    def recover(self, least: int, is_stopped: IsStopped = never) -> list[Issue]:
        """Reconnect to lost hosts. Returns a reason for each host that cannot be used if fewer than
        `least` can, else [], and the next attempt runs without them. is_stopped: to give up."""
        now, before, self.absent = time.monotonic(), self.absent, frozenset[int]()
        lost = [link for link in self.links if not link.is_ready]
        for link in lost:
            if link.node not in before and (seconds := self.returns.note_loss(link.node, now)):
                self.on_event(f"{link.name} was lost again: not used for {seconds:g} s")
        issues = self._reconnect(lost, least, is_stopped) if lost else []
        back = [link for link in lost if link.is_ready]
        back += [self.server.links[node] for node in before if self.server.links[node].is_ready]
        refused = self._refuse_unfit(dict.fromkeys(link.node for link in back))
        away = {link.node for link in self.links if not link.is_ready} | refused.keys()
        if len(self.links) - len(away) < least:
            return [*issues, *refused.values()]
        resting = {n for n in before | {link.node for link in lost} if not self._may_return(n)}
        fit = len(self.links) - len(away | resting) >= least
        self.absent = frozenset(away | resting if fit else away)
        self.next_try = time.monotonic() + RETURN_SECONDS
        return []

    def _reconnect(
        self, lost: Sequence[HostLink], least: int, is_stopped: IsStopped
    ) -> list[Issue]:
        """Restart the agents of lost hosts, with pauses, until all have connected or `patience` is
        over; at most RETURN_PATIENCE once `least` hosts are connected."""
        self.on_event(f"connecting again to {', '.join(link.name for link in lost)}")
        begin, pause, issues = time.monotonic(), FIRST_PAUSE, list[Issue]()
        while away := [link for link in lost if not link.is_ready]:
            is_enough = len(self.links) - len(away) >= least
            end = begin + (min(RETURN_PATIENCE, self.patience) if is_enough else self.patience)
            if time.monotonic() >= end or is_stopped():
                break
            self._start_again(away)
            issues = self.wait(max(0.0, end - time.monotonic()), is_stopped)
            resume = min(time.monotonic() + pause, end)
            while issues and time.monotonic() < resume and not is_stopped():
                time.sleep(POLL_SECONDS)
            pause = min(2 * pause, LONGEST_PAUSE)
        return issues if any(not link.is_ready for link in lost) else []

    def _refuse_unfit(self, nodes: Iterable[int]) -> dict[int, Issue]:
        """Why some of these reconnected hosts cannot be used; their agents are dismissed."""
        links = [self.server.links[node] for node in nodes]
        others = [link for link in self.links if link.is_ready and link not in links]
        facts = [_facts(link) for link in others]
        refused: dict[int, Issue] = {}
        for link in links:
            if issue := next(self._unfit(_facts(link), facts), None):
                seconds = self.returns.note_refusal(link.node, time.monotonic())
                way = f"it is asked again in {seconds:g} s"
                self.on_event(f"{link.name} is back and not used: {issue.message}; {way}")
                self.server.dismiss(link.node, issue.message)
                refused[link.node] = issue
        return refused

    def _unfit(self, host: HostFacts, others: Sequence[HostFacts]) -> Iterator[Issue]:
        """What keeps a host from running the launch with these others, which can."""
        yield from differing_hosts([*others, host])
        if self.checked is not None:
            plan, device = self.checked
            if device == "cuda":
                yield from doubled_hosts([*others, host])
            yield from cluster_host_issues(plan, [host] * plan.job.cluster.nodes, device)

    def _may_return(self, node: int) -> bool:
        return self.returns.may_return(node, time.monotonic())

    def has_returned(self) -> bool:
        """Whether an absent host has reconnected and can be used; restarts the agents of those that
        have not, once in RETURN_SECONDS."""
        if not self.absent:
            return False
        missing = [self.server.links[node] for node in sorted(self.absent)]
        back = [link.node for link in missing if link.is_ready and self._may_return(link.node)]
        if back and len(self._refuse_unfit(back)) < len(back):
            return True
        if time.monotonic() >= self.next_try:
            self.next_try = time.monotonic() + RETURN_SECONDS
            ended = self.starter.failures()
            again = [link for link in missing if link.node in ended and self._may_return(link.node)]
            self._start_again(again)
        return False

    def _start_again(self, links: Sequence[HostLink]) -> None:
        for link in links:
            self.server.forget(link.node)
        self.starter.start([link.node for link in links])

    def start(self, plan: LaunchPlan) -> AgentAttempt:
        """Start torchrun on the first hosts, as many as the plan has nodes. Raises RunFailed when a
        host does not answer."""
        self.attempts += 1
        ranks = self.ranks = self.ranks or plan.world_size // len(self.links)
        links = self.links[: plan.world_size // ranks]
        # The address of the first host that all others can reach: its end of the connection to the
        # launcher, or where that is the loopback, the address at which the others reach the
        # launcher.
        hellos = self.hellos
        known = [hellos[0].local, *(hello.remote for hello in hellos[1:])]
        address = next((a for a in known if not ip_address(a).is_loopback), known[0])
        first = self.links[0]
        try:
            port = int(self.server.request(first.node, "free_port").result(PORT_SECONDS))
        except (RuntimeError, TimeoutError) as error:
            raise RunFailed(f"host {first.name}: {error or 'no answer'}") from None
        write_hosts(self.run.hosts, [link.name for link in links], ranks)
        for node, link in enumerate(links):
            start = plan.node_start(node, len(links), ranks, address, port)
            self.server.send(link.node, Start(self.attempts, start))
        meeting_point = f"{address}:{port}"
        return AgentAttempt(self.server, links, self.attempts, meeting_point, self.starter.failures)


def _facts(link: HostLink) -> HostFacts:
    """The facts of a connected host, under the name that the backend gave it."""
    return replace(_hello(link).facts, name=link.name)


def _hello(link: HostLink) -> Hello:
    if link.hello is None:
        raise RunFailed(f"{link.name} is not connected")
    return link.hello
