"""The hosts of a launch, each with a node agent, as the supervisor sees them, and attempts on them.

A backend provides the names of the hosts and starts an agent on each (AgentStarter). This module
has what all backends share: waiting for the agents, comparing their facts with the plan, running
attempts, reconnecting to lost hosts, leaving bad ones out.

Before each attempt but the first the hosts are placed anew (placement.py): a spare host takes the
place of one that is lost, is blamed for too many failures (records/rundir/blamed.py), or fails the check of
its health (health.py). A host that comes back is compared with the plan before the ranks of the
others are stopped for it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol

from mpctl.core.errors import InputError, Issue, RunFailed
from mpctl.core.units import plural
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.blamed import BlameRecord, read_blamed
from mpctl.records.rundir.directory import KEY, RunDir
from mpctl.records.rundir.launcher import write_hosts
from mpctl.run.hosts.checks import Device, cluster_host_issues, differing_hosts, doubled_hosts
from mpctl.run.hosts.machine import HostFacts
from mpctl.run.launch.attempt import LAUNCHER_ABSENT, AttemptPhase, AttemptState, NodeState
from mpctl.run.launch.control.health import check_hosts
from mpctl.run.launch.control.messages import Command, Hello, Start, write_key
from mpctl.run.launch.control.placement import RETURN_SECONDS, Placement, ReturnPolicy
from mpctl.run.launch.control.server import ControlServer, HostLink
from mpctl.run.launch.launch_plan import LaunchPlan
from mpctl.spec.launch import SILENCE_SECONDS

POLL_SECONDS = 0.02
END_SECONDS = 15.0
STACKS_SECONDS = 2.0
OnEvent = Callable[[str], None]
IsStopped = Callable[[], bool]
RETURN_PATIENCE, FIRST_PAUSE, LONGEST_PAUSE = 15.0, 1.0, 15.0
"""Time that a restart waits for hosts that the run can do without; the pauses between two tries."""
PORT_SECONDS = 10.0
HINT = "use other hosts, or raise launch.exclude_after"


@dataclass
class AgentAttempt:
    """torchrun on hosts of a cluster. links: of these hosts, in the order of nodes; address: the
    rendezvous of the ranks; failures: why the agent of a node did not start or has ended; known:
    what each host last reported, with its state as the launcher sees it."""

    server: ControlServer
    links: Sequence[HostLink]
    number: int
    address: str
    failures: Callable[[], dict[int, Issue]]
    known: dict[int, tuple[NodeState | None, NodeState]] = field(default_factory=dict)

    def poll(self) -> AttemptPhase:
        return AttemptPhase.of_hosts({state.phase for state in self._states()})

    def snapshot(self) -> AttemptState:
        return AttemptState(self._states())

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

    def _states(self) -> list[NodeState]:
        """The states of the hosts, in the order of nodes; only those that a report or a loss has
        changed are made anew."""
        issues = self.failures() if any(link.lost for link in self.links) else {}
        return [self._state(node, link, issues) for node, link in enumerate(self.links)]

    def _state(self, node: int, link: HostLink, issues: Mapping[int, Issue]) -> NodeState:
        """Return the last report of a host, with its failures at times of the launcher's clock."""
        reported = link.reports.get(self.number)
        known = self.known.get(node)
        # The words of a loss and the shift of the clock become better with time.
        is_final = known is not None and not known[1].lost and not known[1].failures
        if known is not None and is_final and known[0] is reported and not link.lost:
            return known[1]
        state, shift = reported or NodeState(node=node), link.clock_shift
        failures = [failure | {"time": failure["time"] + shift} for failure in state.failures]
        lost = _lost(link, state, issues)
        state = replace(state, host=link.name, lost=lost, failures=failures)
        self.known[node] = reported, state
        return state


def _lost(link: HostLink, state: NodeState, issues: Mapping[int, Issue]) -> str:
    """Return why a host is lost to an attempt; empty after its ranks have ended."""
    if state.code is not None or not link.lost:
        return ""
    failure = None if link.lost.startswith(LAUNCHER_ABSENT) else issues.get(link.node)
    return f"{link.lost}: {failure.message}" if failure else link.lost


def never() -> bool:
    return False


class AgentStarter(Protocol):
    """Starter of a backend's node agents; the command of an agent is agent_arguments (below)."""

    def start(self, nodes: Sequence[int]) -> None:
        """Start the agents of these nodes; returns before they have connected."""

    def failures(self) -> dict[int, Issue]:
        """Return the nodes with an agent that could not be started or has ended, with the reason."""

    def end(self) -> None:
        """End whatever was started and still runs."""


@dataclass(frozen=True)
class AgentOrder:
    """The arguments of a node agent. run: the run directory, as an absolute path; key: the file
    there that it reads; port: of the control server, on the launcher's host; seconds: that it tries
    to connect for."""

    run: Path
    key: Path
    port: int
    seconds: float

    @classmethod
    def of(cls, run: RunDir, key: str = f"{KEY}ID", port: int = 0, *, seconds: float) -> AgentOrder:
        """key: the name of the file. A launch chooses key and port; the defaults are shown."""
        return cls(run.path.resolve(), run.nodes.resolve() / key, port, seconds)

    def arguments(self, address: str, node: int | None = None) -> list[str]:
        """The arguments of Python on the host. address: of the launcher, as that host can reach it;
        node: the host's index, where the launcher does not know the host by its name."""
        numbered = [] if node is None else [f"--node={node}"]
        connect = [f"--connect={address}:{self.port}", f"--seconds={self.seconds:g}"]
        module = ["-m", "mpctl.run.launch.node.agent"]
        return [*module, str(self.run), *connect, f"--key={self.key}", *numbered]


@contextmanager
def agent_cluster(
    names: Sequence[str],
    run: RunDir,
    make_starter: Callable[[AgentOrder], AgentStarter],
    on_event: OnEvent,
    *,
    patience: float,
    silence: float = SILENCE_SECONDS,
    addresses: Sequence[str] = (),
    nodes: int | None = None,
    exclude_after: int | None = None,
    may_move: bool = False,
) -> Iterator[AgentCluster]:
    """The hosts `names`, each with a connected agent: the first `nodes` of them (all when None), in
    the order of the plan's nodes, and spare hosts.

    patience: seconds without a new host after which the wait for agents ends; silence: seconds
    without a message after which a host is lost. addresses: of this host, at which the hosts reach
    it; empty where that is not known. exclude_after, may_move: as in
    AgentCluster. Raises InputError with a reason for each host that cannot be used, unless a spare
    host takes its place. A directory that was made for this is removed again when no run was
    written there.
    """
    is_new = not run.is_occupied
    server = ControlServer(names, silence)
    server.open(addresses)
    order = AgentOrder.of(run, f"{KEY}{secrets.token_hex(4)}", server.port, seconds=patience)
    keep_key(run, order.key, server.key)
    if read_blamed(run.blamed) is None:
        on_event(f"{run.blamed} cannot be read: failures of hosts are counted anew")
    cluster = AgentCluster(
        run,
        server,
        make_starter(order),
        on_event,
        patience,
        order.key,
        placement=Placement(tuple(range(len(names) if nodes is None else nodes))),
        blames=BlameRecord.of(run.blamed, exclude_after),
        may_move=may_move,
    )
    try:
        cluster.starter.start(range(len(names)))
        if issues := cluster.gather():
            raise InputError(issues)
        yield cluster
    finally:
        server.close()
        cluster.starter.end()
        order.key.unlink(missing_ok=True)
        if is_new and not run.job.exists():
            run.abandon()


def keep_key(run: RunDir, path: Path, key: bytes) -> None:
    """Write a launch's key, and the folder for it, unless they are there: somebody may have removed
    them while the launch runs. Raises OSError."""
    run.make()
    run.nodes.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        write_key(path, key)


@dataclass
class AgentCluster:
    """Hosts with a node agent each, by their numbers in the backend's list.

    key: the file of the launch's key; placement: which host runs which node; blames: the failures
    that each host is blamed for; may_move: another allocation may have other hosts, so that the run
    ends rather than go on with one that is blamed for too many. attempts: how many were started;
    ranks: of each host; unavailable: hosts that are lost or were refused; next_try: when they are
    tried again, by time.monotonic(); returns: when each may be used; checked: what hosts were last
    checked for.
    """

    run: RunDir
    server: ControlServer
    starter: AgentStarter
    on_event: OnEvent
    patience: float
    key: Path
    placement: Placement
    blames: BlameRecord
    may_move: bool = False
    attempts: int = 0
    ranks: int = 0
    unavailable: set[int] = field(default_factory=set)
    next_try: float = 0.0
    returns: ReturnPolicy = field(default_factory=ReturnPolicy)
    checked: tuple[Plan, Device] | None = None

    @property
    def links(self) -> list[HostLink]:
        """The connection of each host of the next attempt, in the order of the plan's nodes."""
        return [self.server.links[host] for host in self.placement.used]

    @property
    def spares(self) -> list[HostLink]:
        """The connections of the hosts without a node of the plan."""
        return [link for link in self.server.links if link.node not in self.placement.assigned]

    @property
    def hellos(self) -> list[Hello]:
        """The hello messages of the agents. Raises RunFailed when one is not connected."""
        return [_hello(link) for link in self.links]

    @property
    def hosts(self) -> Sequence[HostFacts]:
        """The facts of each host, under the name that the backend gave it."""
        return [_facts(link) for link in self.links]

    @property
    def excluded(self) -> list[str]:
        """The names of the hosts that are blamed for too many failures."""
        return [link.name for link in self.server.links if self.blames.is_excluded(link.name)]

    def blame(self, host: str, error: str) -> None:
        """Count a failure against a host, for this launch and those that resume the run."""
        try:
            failures = self.blames.add(host, error, time.time())
        except OSError as failed:
            self.on_event(f"{self.run.blamed} could not be written: {failed.strerror}")
            return
        if failures == self.blames.most:
            self.on_event(f"{host} is not to be used again: {self._blame_text(host)}")

    def _blame_text(self, host: str) -> str:
        times = plural(self.blames.blamed.failures(host), "failure")
        return f"blamed for {times} of this run (launch.exclude_after {self.blames.most})"

    # ------------------------------------------------------------ connecting

    def gather(self) -> list[Issue]:
        """Wait for the agents of all hosts, then place those that came. Returns the reasons of the
        hosts that did not when there are too few."""
        issues = self.wait(self.server.links)
        self.unavailable = {link.node for link in self.server.links if not link.is_ready}
        ready = [link for link in self.server.links if link.is_ready]
        fit = [link.node for link in ready if not self.blames.is_excluded(link.name)]
        excluded = [link.node for link in ready if link.node not in fit]
        least = len(self.placement.assigned)
        placement = self.placement.renewed(fit, excluded, least)
        if len(placement.used) < least:
            return issues
        said = {issue.where: issue.message for issue in issues}
        reasons = {link.node: said[link.name] for link in self.server.links if link.name in said}
        for link in self.spares:
            if link.node in reasons:
                self.on_event(f"spare host {link.name} is not there: {reasons[link.node]}")
        blamed = {host: self._blame_text(self.server.links[host].name) for host in excluded}
        self._place(placement, reasons | blamed)
        return []

    def wait(
        self, links: Sequence[HostLink], patience: float | None = None, is_stopped: IsStopped = never
    ) -> list[Issue]:
        """Wait for the agents of these hosts, at most `patience` seconds (of the cluster, when
        None) without a new one, and RETURN_PATIENCE once there are enough for the plan; an issue
        for each host that did not come."""
        patience = self.patience if patience is None else patience
        ready, deadline = -1, 0.0
        while True:
            missing = [link for link in links if not link.is_ready]
            if not missing:
                return []
            for link in missing:
                if link.lost:  # it came and went; a process of a joined world comes again
                    self.server.forget(link.node)
            if len(links) - len(missing) > ready:
                ready = len(links) - len(missing)
                is_enough = self._has_enough()
                seconds = min(patience, RETURN_PATIENCE) if is_enough else patience
                deadline = time.monotonic() + seconds
            failures = self.starter.failures()
            waiting = [link for link in missing if link.node not in failures]
            if not waiting or time.monotonic() > deadline or is_stopped():
                late = (
                    f"its node agent did not connect to port {self.server.port} of this host within {self.patience:g} s"
                )
                hint = "check that it can reach this one (firewall, interface), or raise launch.start_seconds"
                silent = [Issue("host-did-not-connect", w.name, late, hint) for w in waiting]
                known = (failures[link.node] for link in missing if link.node in failures)
                return [*known, *silent]
            time.sleep(POLL_SECONDS)

    def check(self, plan: Plan, device: Device) -> list[Issue]:
        """Return the issues of running the plan on the hosts, and differences between them. Unfit spare hosts are
        dismissed."""
        self.checked = (plan, device)
        doubled = doubled_hosts(self.hosts) if device == "cuda" else []
        lacks = cluster_host_issues(plan, self.hosts, device)
        if issues := [*doubled, *differing_hosts(self.hosts), *lacks]:
            return issues
        self._refuse_unfit(link.node for link in self.spares if link.is_ready)
        return []

    # ------------------------------------------------------------ before the next attempt

    def recover(self, least: int, is_stopped: IsStopped = never) -> list[Issue]:
        """Place the hosts for the next attempt. Reconnects to lost ones, and waits for them where
        no spare host can take their place. Returns a reason for each host that cannot be used if
        fewer than `least` can, else []. is_stopped: to give up."""
        again = self._note_losses(self.server.links)
        lost = [link for link in self.server.links if not link.is_ready]
        gone = {link.node: link.lost or "lost" for link in lost}
        issues = self._reconnect(lost, least, is_stopped) if lost else []
        refused = self._refuse_unfit(host for host in self.unavailable if self.server.links[host].is_ready)
        ready = {link.node: link for link in self.server.links if link.is_ready}
        ready = {host: link for host, link in ready.items() if host not in refused}
        self.unavailable = {link.node for link in self.server.links} - ready.keys()
        reasons = {
            host: self._blame_text(link.name) for host, link in ready.items() if self.blames.is_excluded(link.name)
        }
        barred = {*reasons} if self.may_move else set[int]()
        unhealthy = self._unhealthy([*ready.values()], is_stopped)
        cordoned = [host for host in ready if not self._may_return(host)]
        unwanted = [*cordoned, *unhealthy, *reasons]
        fit = [host for host in ready if host not in unwanted]
        usable = dict.fromkeys(host for host in unwanted if host not in barred)
        placement = self.placement.renewed(fit, [*usable], least)
        if len(placement.used) < least:
            names = {host: self.server.links[host].name for host in barred}
            bad = [Issue("host-excluded", names[host], reasons[host], HINT) for host in barred]
            return [*issues, *refused.values(), *bad]
        found = {host: issue.message for host, issue in (refused | unhealthy).items()}
        self._say_cordoned({h: again[h] for h in again.keys() - {*placement.used}})
        self._place(placement, gone | found | reasons)
        for host in unhealthy.keys() - {*placement.used}:
            self._dismiss(host, unhealthy[host])
        self.next_try = time.monotonic() + RETURN_SECONDS
        return []

    def _note_losses(self, links: Sequence[HostLink]) -> dict[int, float]:
        """Count those of these hosts that were lost since they were last looked at. Returns the
        seconds for which those that were lost before should not be used."""
        again: dict[int, float] = {}
        for link in links:
            if link.lost and link.node not in self.unavailable:
                self.unavailable.add(link.node)
                seconds = self.returns.note_loss(link.node, time.monotonic())
                if seconds:
                    again[link.node] = seconds
        return again

    def _say_cordoned(self, again: Mapping[int, float]) -> None:
        for host, seconds in sorted(again.items()):
            name = self.server.links[host].name
            self.on_event(f"{name} was lost again: not used for {seconds:g} s")

    def _place(self, placement: Placement, reasons: Mapping[int, str]) -> None:
        """Use a placement, and report what it changes. reasons: why hosts are not wanted."""
        links = self.server.links
        for node, (before, now) in enumerate(zip(self.placement.assigned, placement.assigned, strict=True)):
            if before != now:
                change = f"{links[now].name} takes the place of {links[before].name} (node {node})"
                self.on_event(f"{change}: {reasons.get(before, 'it cannot be used')}")
        for host in sorted(placement.absent & reasons.keys()):
            self.on_event(f"{links[host].name} is left out: {reasons[host]}")
        for host in placement.unwanted:
            if host in reasons:
                way = "used all the same, since no other host is there (launch.spare_nodes)"
                self.on_event(f"{links[host].name}: {reasons[host]}; {way}")
        self.placement = placement

    def _unhealthy(self, links: Sequence[HostLink], is_stopped: IsStopped) -> dict[int, Issue]:
        """Return the issues of hosts that fail a health check now. Only hosts that were checked for a plan are
        asked."""
        if self.checked is None or len(links) < 2 or is_stopped():
            return {}
        needs_gpus = self.checked[1] == "cuda"
        try:
            health = check_hosts(self.server, links, self.key, needs_gpus=needs_gpus, is_stopped=is_stopped)
        except OSError as error:  # the key cannot be read here
            self.on_event(f"hosts were not checked: {error}")
            return {}
        for note in health.notes:
            self.on_event(f"health of the hosts: {note}")
        bad = dict(health.bad)
        facts = {
            link.node: replace(report.facts, name=link.name)
            for link in links
            if (report := health.reports.get(link.node)) and report.facts and link.node not in bad
        }
        for host, found in facts.items():
            if issue := next(self._unfit(found, []), None):
                bad[host] = issue
        if len(bad) == len(links):
            self.on_event(f"health of the hosts: all: {next(iter(bad.values())).message}")
            return {}
        return bad

    def _reconnect(self, lost: Sequence[HostLink], least: int, is_stopped: IsStopped) -> list[Issue]:
        """Restart the agents of lost hosts. Where no spare host can take their place, wait, with
        pauses, until all have connected or `patience` is over; at most RETURN_PATIENCE once `least`
        hosts are connected."""
        self.on_event(f"connecting again to {', '.join(link.name for link in lost)}")

        def is_over() -> bool:
            return is_stopped() or self._has_enough()

        begin, pause, issues = time.monotonic(), FIRST_PAUSE, list[Issue]()
        self._start_again(lost)
        while (missing := [link for link in lost if not link.is_ready]) and not is_over():
            is_enough = len(self.server.links) - len(missing) >= least
            end = begin + (min(RETURN_PATIENCE, self.patience) if is_enough else self.patience)
            issues = self.wait(lost, max(0.0, end - time.monotonic()), is_over)
            resume = min(time.monotonic() + pause, end)
            while issues and time.monotonic() < resume and not is_over():
                time.sleep(POLL_SECONDS)
            pause = min(2 * pause, LONGEST_PAUSE)
            if not issues or time.monotonic() >= end:
                break
            self._start_again([link for link in lost if not link.is_ready])
        return issues if any(not link.is_ready for link in lost) else []

    def _has_enough(self) -> bool:
        """Whether connected hosts that may be used fill all nodes of the plan."""
        links = (link for link in self.server.links if link.is_ready)
        fit = [link for link in links if not self.blames.is_excluded(link.name)]
        return sum(self._may_return(link.node) for link in fit) >= len(self.placement.assigned)

    def _refuse_unfit(self, hosts: Iterable[int]) -> dict[int, Issue]:
        """Return why some of these connected hosts cannot be used, and dismiss their agents."""
        links = [self.server.links[host] for host in hosts]
        others = [link for link in self.links if link.is_ready and link not in links]
        facts = [_facts(link) for link in others]
        refused: dict[int, Issue] = {}
        for link in links:
            if issue := next(self._unfit(_facts(link), facts), None):
                seconds = self._dismiss(link.node, issue)
                way = f"it is asked again in {seconds:g} s"
                self.on_event(f"{link.name} is connected and not used: {issue.message}; {way}")
                refused[link.node] = issue
        return refused

    def _dismiss(self, host: int, issue: Issue) -> float:
        """End the agent of a host that is not used; the seconds until it is asked again."""
        self.unavailable.add(host)
        self.server.dismiss(host, issue.message)
        return self.returns.note_refusal(host, time.monotonic())

    def _unfit(self, host: HostFacts, others: Sequence[HostFacts]) -> Iterator[Issue]:
        """Yield the issues of adding a host to these others, which can run the launch."""
        yield from differing_hosts([*others, host])
        if self.checked is not None:
            plan, device = self.checked
            if device == "cuda":
                yield from doubled_hosts([*others, host])
            yield from cluster_host_issues(plan, [host] * plan.job.cluster.nodes, device)

    def _may_return(self, host: int) -> bool:
        return self.returns.may_return(host, time.monotonic())

    def has_returned(self) -> bool:
        """Whether a host has reconnected and can be used for a node that the attempt runs without;
        one that is not needed becomes a spare host. Restarts the agents of lost hosts, once in
        RETURN_SECONDS."""
        used = {*self.placement.used}
        idle = [link for link in self.server.links if link.node not in used]
        self._say_cordoned(self._note_losses(idle))
        missing = [link for link in idle if link.node in self.unavailable or self._is_awaited(link)]
        back = [link for link in missing if link.is_ready and self._may_return(link.node)]
        if back:
            refused = self._refuse_unfit(link.node for link in back)
            fit = [link for link in back if link.node not in refused]
            if self.placement.absent and any(not self.blames.is_excluded(x.name) for x in fit):
                return True
            self.unavailable -= {link.node for link in fit}
        if missing and time.monotonic() >= self.next_try:
            self.next_try = time.monotonic() + RETURN_SECONDS
            ended = self.starter.failures()
            gone = [link for link in missing if link.lost or link.node in ended]
            self._start_again([link for link in gone if self._may_return(link.node)])
        return False

    def _is_awaited(self, link: HostLink) -> bool:
        """Whether an elastic run does without a host that it may use again."""
        return link.node in self.placement.absent and not self.blames.is_excluded(link.name)

    def _start_again(self, links: Sequence[HostLink]) -> None:
        for link in links:
            self.server.forget(link.node)
        try:
            keep_key(self.run, self.key, self.server.key)
        except OSError as error:
            self.on_event(f"{self.key} cannot be written: {error.strerror or error}")
            return
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
        keep_key(self.run, self.key, self.server.key)
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
