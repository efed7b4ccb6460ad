"""Training over node agents: two of them on this machine, taken for two hosts.

Hosts that are lost and come back: again and again, late, unfit, or never.

An attempt over hosts whose clocks differ.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from mpctl.core.errors import InputError, Issue
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.rank_files import FailureRecord, StepRecord
from mpctl.run.hosts.machine import HostFacts, Machine, host_facts
from mpctl.run.launch.attempt import NodeState
from mpctl.run.launch.control import cluster as cluster_module
from mpctl.run.launch.control import server as server_module
from mpctl.run.launch.control.cluster import AgentAttempt, AgentCluster, AgentOrder, agent_cluster
from mpctl.run.launch.control.health import Health
from mpctl.run.launch.control.messages import FROM_AGENT, Connection, Hello, Report, encode, read_key
from mpctl.run.launch.control.server import ControlServer
from mpctl.run.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.run.launch.set_up import set_up_run
from mpctl.run.launch.supervise import RunOutcome, run_launch
from mpctl.spec.load import load_job
from tests.run.launch.command import Launched
from tests.run.launch.control.agents import LocalAgents
from tests.run.launch.control.peers import SECONDS, agent, open_socket, until
from tests.train.runtime.tiny import tiny_job, tiny_plan

OnRecord = Callable[[StepRecord], None]


class Hosts:
    """Two hosts n0 and n1, spare hosts n2 and so on, and a run on them."""

    def __init__(self, folder: Path, spares: int = 0) -> None:
        self.run = RunDir(folder)
        self.names = [f"n{host}" for host in range(2 + spares)]
        self.events: list[str] = []
        self.starter: LocalAgents

    def make_starter(self, order: AgentOrder) -> LocalAgents:
        self.starter = LocalAgents(order)
        return self.starter

    @contextmanager
    def connected(self) -> Iterator[AgentCluster]:
        make, event = self.make_starter, self.events.append
        most = 1 if len(self.names) > 2 else None  # a failure moves the node where a host is spare
        with agent_cluster(self.names, self.run, make, event, patience=60, nodes=2, exclude_after=most) as cluster:
            yield cluster

    def launch(self, plan: LaunchPlan, on_record: OnRecord = lambda _: None) -> RunOutcome:
        with self.connected() as cluster:
            set_up_run(plan, overwrite=False, resume=False, on_progress=lambda *_: None)
            return run_launch(plan, cluster, on_record, self.events.append)

    def pids(self) -> list[int]:
        """Processes that have the run directory in their command line."""
        path = str(self.run.path)
        found = psutil.process_iter(["cmdline"])
        return [p.pid for p in found if path in " ".join(p.info["cmdline"] or [])]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path / "run")


def _plan(data: Path, run: RunDir, **settings: object) -> LaunchPlan:
    keys = {"cluster__nodes": 2, "cluster__gpus_per_node": 1, **settings}
    return plan_launch(tiny_plan(tiny_job(data, **keys)), run, Machine(2, 0, 2**34), hosts=2)


def test_two_hosts_train_as_one(data: Path, finished: Launched, hosts: Hosts) -> None:
    plan = _plan(data, hosts.run, parallel__tp=1, parallel__dp=2)
    outcome = hosts.launch(plan)
    assert outcome.status == "finished", outcome.failure
    losses = [record["loss"] for record in hosts.run.records()]
    assert losses == pytest.approx(finished.losses, rel=1e-6)
    document = json.loads((hosts.run.nodes / "hosts.json").read_text())
    assert document["hosts"] == [
        {"node": 0, "host": "n0", "ranks": {"first": 0, "count": 1}},
        {"node": 1, "host": "n1", "ranks": {"first": 1, "count": 1}},
    ]
    assert not hosts.pids() and not list(hosts.run.nodes.glob("key*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", ["agent", pytest.param("torchrun", marks=pytest.mark.slow), pytest.param("rank", marks=pytest.mark.slow)]
)
def test_a_killed_end_is_named_and_the_run_continues(data: Path, finished: Launched, hosts: Hosts, victim: str) -> None:
    settings = {"launch__max_restarts": 1, "checkpoint__interval": 2}
    plan = _plan(data, hosts.run, parallel__tp=1, parallel__dp=2, **settings)
    killed: list[int] = []

    def kill(record: StepRecord) -> None:
        if record["step"] == 3 and not killed:
            agent = psutil.Process(hosts.starter.processes[1].pid)
            torchrun = agent.children()[0]
            ends = {"agent": agent, "torchrun": torchrun, "rank": torchrun.children()[0]}
            killed.append(ends[victim].pid)
            os.kill(killed[0], signal.SIGKILL)

    outcome = hosts.launch(plan, kill)
    assert (outcome.status, outcome.attempts) == ("finished", 2), outcome.failure
    words = {
        "agent": "host n1 (node 1): ",
        "torchrun": "torchrun on host n1, with its ranks, ",
        "rank": "rank 1 on host n1 ",
    }
    assert hosts.events[0].startswith(words[victim]), hosts.events
    assert victim == "agent" or "killed by signal 9" in hosts.events[0], hosts.events
    records = list(hosts.run.records())
    assert [record["loss"] for record in records] == pytest.approx(finished.losses, rel=1e-6)
    assert not hosts.pids()


@pytest.mark.slow
def test_a_spare_host_goes_on_with_the_same_losses(data: Path, finished: Launched, tmp_path: Path) -> None:
    """A rank of n1 is killed, which is the one failure that n1 may be blamed for."""
    hosts = Hosts(tmp_path / "run", spares=1)
    settings = {"launch__max_restarts": 1, "checkpoint__interval": 2}
    plan = _plan(data, hosts.run, parallel__tp=1, parallel__dp=2, **settings)
    killed: list[int] = []

    def kill(record: StepRecord) -> None:
        if record["step"] == 3 and not killed:
            torchrun = psutil.Process(hosts.starter.processes[1].pid).children()[0]
            killed.append(torchrun.children()[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    outcome = hosts.launch(plan, kill)
    assert (outcome.status, outcome.attempts) == ("finished", 2), outcome.failure
    said = "\n".join(hosts.events)
    assert "n2 takes the place of n1 (node 1): blamed for 1 failure of this run" in said
    records = list(hosts.run.records())
    assert [record["loss"] for record in records] == pytest.approx(finished.losses, rel=1e-6)
    document = json.loads(hosts.run.hosts.read_text())
    assert [entry["host"] for entry in document["hosts"]] == ["n0", "n2"]
    assert json.loads(hosts.run.launcher.read_text())["hosts"] == ["n0", "n2"]
    assert json.loads(hosts.run.blamed.read_text())["hosts"]["n1"]["failures"] == 1
    assert not hosts.pids()


@pytest.mark.slow
def test_a_host_is_not_lost_while_its_ranks_have_not_started(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data may be prepared for minutes between the first contact and the first attempt."""
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.2)
    with hosts.connected() as cluster:
        cluster.server.silence = 2.0
        time.sleep(3.0)
        assert [link.lost for link in cluster.links] == ["", ""]


@pytest.mark.slow
def test_a_host_that_does_not_see_the_run_directory_is_refused(hosts: Hosts) -> None:
    def blind(order: AgentOrder) -> LocalAgents:
        return LocalAgents(replace(order, key=order.key.with_name("absent")))

    connected = agent_cluster(["n0", "n1"], hosts.run, blind, print, patience=60)
    with pytest.raises(InputError) as caught, connected:
        raise AssertionError("connected")
    rules = [issue.rule for issue in caught.value.issues]
    assert rules == ["run-dir-not-shared"] * 2 and "n0" in str(caught.value)
    assert not hosts.run.path.exists() and not hosts.pids()


NAMES = ["n0", "n1", "n2", "n3", "n4"]
GPUS = replace(host_facts(), machine=Machine(8, 4, 2**40))


@dataclass
class Peers:
    """An AgentStarter that connects hosts from this process. facts: of each host; down: hosts that
    do not connect."""

    order: AgentOrder
    facts: dict[int, HostFacts]
    down: set[int]
    key: bytes = b""

    def __post_init__(self) -> None:
        self.connections: dict[int, Connection] = {}
        self.starts, self.failed = 0, set[int]()

    def start(self, nodes: Sequence[int]) -> None:
        self.starts += 1
        self.failed = (self.failed - set(nodes)) | (set(nodes) & self.down)
        for node in set(nodes) - self.down:
            opened = open_socket(self.order.port)
            connection = Connection.prove(opened, read_key(self.order.key), SECONDS)
            facts = replace(self.facts.get(node, GPUS), boot=f"boot {node}")
            connection.send(Hello(f"n{node}", facts, node, "127.0.0.1", "127.0.0.1"))
            self.connections[node] = connection

    def failures(self) -> dict[int, Issue]:
        return {n: Issue("unavailable", NAMES[n], "the host did not answer") for n in self.failed}

    def end(self) -> None:
        for connection in self.connections.values():
            connection.socket.close()


class World:
    """Three connected hosts of four GPUs, checked for a plan of as many, and spare hosts. unhealthy:
    what the next check of their health finds, by host."""

    def __init__(self, cluster: AgentCluster, events: list[str]) -> None:
        self.cluster, self.events = cluster, events
        self.peers = cast(Peers, cluster.starter)
        self.unhealthy: dict[int, str] = {}

    def check_hosts(self, *_: object, **__: object) -> Health:
        return Health({host: Issue("unhealthy", NAMES[host], text) for host, text in self.unhealthy.items()})

    def lose(self, node: int) -> None:
        self.peers.connections[node].socket.close()
        assert until(lambda: self.cluster.server.links[node].lost)

    def used(self) -> list[int]:
        return [link.node for link in self.cluster.links]

    def said(self) -> str:
        return "\n".join(self.events)


@contextmanager
def worlds(folder: Path, monkeypatch: pytest.MonkeyPatch, spares: int = 0, **settings: Any) -> Iterator[World]:
    monkeypatch.setattr(cluster_module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(cluster_module, "RETURN_PATIENCE", 0.5)
    job = load_job(None, {"cluster.nodes": 3, "cluster.gpus_per_node": 4, "parallel.dp": 12})
    events: list[str] = []
    run = RunDir(folder / "run")
    down = settings.pop("down", set())
    made = agent_cluster(
        NAMES[: 3 + spares],
        run,
        lambda order: Peers(order, {}, down),
        events.append,
        patience=6,
        addresses=["127.0.0.1"],
        nodes=3,
        **settings,
    )
    with made as cluster:
        world = World(cluster, events)
        monkeypatch.setattr(cluster_module, "check_hosts", world.check_hosts)
        assert cluster.check(tiny_plan(job), "cuda") == []
        yield world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with worlds(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """With the spare hosts n3 and n4."""
    with worlds(tmp_path, monkeypatch, spares=2, exclude_after=2) as made:
        yield made


def test_a_lost_host_is_tried_until_the_patience_of_the_launch_is_over(world: World) -> None:
    """A link that is away for longer than one try to connect costs one restart, not the run."""
    world.peers.down = {2}
    world.lose(2)
    begin = time.monotonic()

    def is_stopped() -> bool:  # asked while it waits
        if time.monotonic() > begin + 1.5:
            world.peers.down.clear()
        return False

    assert world.cluster.recover(3, is_stopped) == []
    assert world.used() == [0, 1, 2] and world.peers.starts > 3


def test_a_host_returns_after_the_folder_of_the_key_was_removed(world: World) -> None:
    """The agent of a host that is started again reads the key."""
    nodes, key = world.cluster.run.nodes, world.cluster.key.read_bytes()
    shutil.rmtree(nodes)
    world.lose(2)
    assert world.cluster.recover(3, lambda: False) == []
    assert world.used() == [0, 1, 2] and world.cluster.key.read_bytes() == key
    assert stat.S_IMODE(nodes.stat().st_mode) == 0o700
    assert stat.S_IMODE(world.cluster.key.stat().st_mode) == 0o600


def test_a_host_that_never_comes_back_is_named_after_that(world: World) -> None:
    world.cluster.patience = 0.5
    world.peers.down = {2}
    world.lose(2)
    (issue,) = world.cluster.recover(3)
    assert (issue.where, issue.message) == ("n2", "the host did not answer")


def test_a_stop_ends_the_waiting(world: World) -> None:
    world.cluster.patience = 600
    world.peers.down = {2}
    world.lose(2)
    begin = time.monotonic()
    assert world.cluster.recover(3, lambda: time.monotonic() > begin + 0.3)
    assert time.monotonic() - begin < 10


def test_an_elastic_run_continues_without_it_and_takes_it_back(world: World) -> None:
    world.peers.down = {2}
    world.lose(2)
    assert world.cluster.recover(2) == [] and world.used() == [0, 1]
    assert not world.cluster.has_returned()
    world.peers.down.clear()
    world.cluster.next_try = 0.0
    assert until(world.cluster.has_returned)
    assert world.cluster.recover(2) == [] and world.used() == [0, 1, 2]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(GPUS, torch="2.4.0"), "hosts have different versions of torch"),
        (replace(GPUS, mpctl="0.0.1"), "hosts have different versions of mpctl"),
        (replace(GPUS, machine=Machine(8, 3, 2**40)), "but this host shows 3 GPUs"),
        (replace(GPUS, machine=Machine(8, 4, 2**10)), ""),
    ],
)
def test_an_unfit_host_stays_away_and_the_others_are_not_stopped(world: World, facts: HostFacts, words: str) -> None:
    world.peers.down = {2}
    world.lose(2)
    assert world.cluster.recover(2) == []
    world.peers.down.clear()
    world.peers.facts[2] = facts
    world.cluster.next_try = 0.0
    returned = until(lambda: world.cluster.has_returned() or "connected and not used" in world.said())
    if not words:  # nothing of a plan without a model is compared with its memory
        assert returned and "not used" not in world.said()
        return
    assert returned and words in world.said() and "asked again in 20 s" in world.said()
    assert not world.cluster.has_returned() and world.used() == [0, 1]
    assert world.said().count("connected and not used") == 1


def test_an_unfit_host_ends_a_run_that_needs_it_with_the_reason(world: World) -> None:
    world.lose(2)
    world.peers.facts[2] = replace(GPUS, torch="2.4.0")
    (issue,) = world.cluster.recover(3)
    assert issue.rule == "host-torch"


@pytest.mark.slow
def test_a_host_without_the_run_directory_is_not_used(tmp_path: Path) -> None:
    """A reboot without the mount: its agent has no key, and the run continues without it."""

    class Unmounted(LocalAgents):
        is_mounted = True

        def start(self, nodes: Sequence[int]) -> None:
            if not self.is_mounted:
                self.order = replace(self.order, key=self.order.key.with_name("absent"))
            super().start(nodes)

    starters: list[Unmounted] = []

    def make(order: AgentOrder) -> Unmounted:
        starters.append(Unmounted(order))
        return starters[0]

    run = RunDir(tmp_path / "run")
    with agent_cluster(["n0", "n1"], run, make, print, patience=60) as cluster:
        starters[0].is_mounted = False
        starters[0].processes[1].kill()
        assert until(lambda: cluster.server.links[1].lost)
        assert cluster.recover(1) == []
        assert [link.node for link in cluster.links] == [0]
        assert until(cluster.starter.failures)
        (issue,) = cluster.starter.failures().values()
        assert issue.rule == "run-dir-not-shared"
        assert not cluster.has_returned()


def test_a_host_that_flaps_is_used_later_each_time(world: World) -> None:
    for _ in range(2):  # it is back at once: the first time it is used, the second time it is not
        world.lose(2)
        assert world.cluster.recover(2) == []
    assert world.used() == [0, 1]
    assert "n2 was lost again: not used for 40 s" in world.said()
    assert not world.cluster.has_returned()
    world.cluster.returns.not_before[2] = 0.0
    assert until(world.cluster.has_returned)


def test_a_flapping_host_is_used_where_the_run_cannot_do_without_it(world: World) -> None:
    for _ in range(3):
        world.lose(2)
        assert world.cluster.recover(3) == []
        assert world.used() == [0, 1, 2]
    assert "used all the same" in world.said() and "not used for" not in world.said()


# ---------------------------------------------------------------- spare hosts


def test_a_spare_host_takes_over_at_once_and_the_others_keep_their_nodes(spared: World) -> None:
    spared.peers.down = {1}
    spared.lose(1)
    spared.cluster.patience = 600  # of which nothing is waited
    begin = time.monotonic()
    assert spared.cluster.recover(3) == []
    assert time.monotonic() - begin < 10
    assert spared.used() == [0, 3, 2]
    assert "n3 takes the place of n1 (node 1): its node agent ended" in spared.said()


def test_a_host_that_comes_back_is_a_spare_host(spared: World) -> None:
    spared.lose(1)  # its agent is started again, and connects at once
    assert spared.cluster.recover(3) == [] and spared.used() == [0, 3, 2]
    link = spared.cluster.server.links[1]
    assert until(lambda: link.is_ready)
    assert not spared.cluster.has_returned() and spared.used() == [0, 3, 2]
    spared.peers.down = {2, 4}
    for host in (2, 4):
        spared.lose(host)
    assert spared.cluster.recover(3) == [] and spared.used() == [0, 3, 1]


def test_a_lost_spare_host_is_tried_again_and_costs_nothing(spared: World) -> None:
    spared.lose(3)
    spared.cluster.next_try = 0.0
    assert until(lambda: not spared.cluster.has_returned() and spared.peers.starts == 2)
    assert until(lambda: spared.cluster.server.links[3].is_ready)
    assert not spared.cluster.has_returned() and spared.used() == [0, 1, 2]


def test_a_host_of_the_attempt_is_not_forgotten_while_it_runs(spared: World) -> None:
    """Its loss must end the attempt."""
    spared.lose(1)
    spared.cluster.next_try = 0.0
    assert not spared.cluster.has_returned()
    assert spared.cluster.server.links[1].lost and spared.peers.starts == 1


def test_an_unhealthy_host_is_replaced_and_asked_again_later(spared: World) -> None:
    spared.unhealthy = {0: "cannot write into the run directory"}
    assert spared.cluster.recover(3) == [] and spared.used() == [3, 1, 2]
    assert "n3 takes the place of n0 (node 0): cannot write" in spared.said()
    assert until(lambda: spared.cluster.server.links[0].lost)
    assert spared.cluster.returns.not_before[0] > time.monotonic() + 15


def test_an_unhealthy_host_is_used_where_the_run_needs_it(world: World) -> None:
    world.unhealthy = {0: "uncorrected ECC errors: 12 on GPU 1"}
    assert world.cluster.recover(3) == [] and world.used() == [0, 1, 2]
    assert "n0: uncorrected ECC errors: 12 on GPU 1; used all the same" in world.said()
    assert world.cluster.recover(2) == [] and world.used() == [1, 2]
    assert "n0 is left out: uncorrected ECC errors" in world.said()


def test_what_all_hosts_have_is_no_reason_to_leave_one_out(world: World) -> None:
    world.unhealthy = dict.fromkeys(range(3), "cannot write into the run directory: full")
    assert world.cluster.recover(2) == [] and world.used() == [0, 1, 2]
    assert "health of the hosts: all: cannot write" in world.said()


# ---------------------------------------------------------------- blamed hosts


def test_a_host_is_replaced_after_its_second_failure(spared: World) -> None:
    spared.cluster.blame("n1", "killed by signal 9")
    assert spared.cluster.recover(3) == [] and spared.used() == [0, 1, 2]
    spared.cluster.blame("n1", "killed by signal 9")
    assert spared.cluster.recover(3) == [] and spared.used() == [0, 3, 2]
    reason = "blamed for 2 failures of this run (launch.exclude_after 2)"
    assert f"n1 is not to be used again: {reason}" in spared.said()
    assert f"n3 takes the place of n1 (node 1): {reason}" in spared.said()
    spared.lose(0)
    spared.lose(4)
    spared.peers.down = {0, 4}
    spared.cluster.patience = 0.5
    assert spared.cluster.recover(3) == [] and spared.used() == [1, 3, 2]  # better than none
    assert f"n1: {reason}; used all the same" in spared.said()


def test_an_elastic_run_goes_on_without_a_blamed_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with worlds(tmp_path, monkeypatch, exclude_after=1) as world:
        world.cluster.blame("n2", "host n2 (node 2): lost")
        assert world.cluster.recover(2) == [] and world.used() == [0, 1]
        assert not world.cluster.has_returned()
        assert "n2 is left out: blamed for 1 failure" in world.said()


def test_a_run_that_may_move_ends_where_only_a_blamed_host_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worlds(tmp_path, monkeypatch, exclude_after=1, may_move=True) as world:
        world.cluster.blame("n2", "killed")
        (issue,) = world.cluster.recover(3)
        assert (issue.rule, issue.where) == ("host-excluded", "n2")
        assert world.cluster.recover(2) == [] and world.used() == [0, 1]


def test_a_resumed_run_begins_without_its_blamed_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with worlds(tmp_path, monkeypatch, spares=1, exclude_after=1) as world:
        world.cluster.blame("n0", "killed")
        world.cluster.run.job.write_text("{}")  # so that the directory is that of a run
    with worlds(tmp_path, monkeypatch, spares=1, exclude_after=1) as world:
        assert world.used() == [3, 1, 2]
        assert "n3 takes the place of n0 (node 0): blamed for 1 failure" in world.said()
    with worlds(tmp_path, monkeypatch, exclude_after=1) as world:
        assert world.used() == [0, 1, 2] and "used all the same" in world.said()


def test_a_spare_host_stands_in_for_one_that_never_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with worlds(tmp_path, monkeypatch, spares=2, down={1, 4}) as world:
        assert world.used() == [0, 3, 2]
        assert "n3 takes the place of n1 (node 1): the host did not answer" in world.said()
        assert "spare host n4 is not there: the host did not answer" in world.said()
    down = {1, 2, 3}
    with pytest.raises(InputError) as caught, worlds(tmp_path, monkeypatch, spares=2, down=down):
        raise AssertionError("connected")
    assert [issue.where for issue in caught.value.issues] == ["n1", "n2", "n3"]


def failure(rank: int, at: float) -> FailureRecord:
    return {
        "rank": rank,
        "coords": {},
        "doing": "step 3",
        "error": "ValueError: odd",
        "time": at,
        "is_echo": False,
        "traceback": [],
    }


def report(connection: Connection, node: int, *, ahead: float, failed: float | None = None) -> None:
    """Send a report of an agent whose clock is `ahead` seconds fast; failed: seconds ago."""
    now = time.time() + ahead
    failures = [] if failed is None else [failure(node, now - failed)]
    connection.send(Report(1, NodeState(node=node, failures=failures), clock=now))


def test_which_rank_failed_first_does_not_hang_on_the_clocks_of_hosts(server: ControlServer) -> None:
    """Rank 1 failed 2 s before rank 0, on a host whose clock is 5 s ahead: by the records alone it
    would be the second."""
    agents = [agent(server, node) for node in range(2)]
    assert until(lambda: all(link.is_ready for link in server.links))
    report(agents[0], 0, ahead=0.0, failed=1.0)
    report(agents[1], 1, ahead=5.0, failed=3.0)
    attempt = AgentAttempt(server, server.links, 1, "127.0.0.1:29500", dict)
    assert until(lambda: len(attempt.snapshot().failures) == 2)
    failures = attempt.snapshot().failures
    assert [record["rank"] for record in failures] == [1, 0]
    assert failures[1]["time"] - failures[0]["time"] == pytest.approx(2.0, abs=0.5)


def test_a_report_that_came_late_does_not_move_a_clock(server: ControlServer) -> None:
    """The report with the least delay counts, among the last ones."""
    connection, link = agent(server, 0), server.links[0]
    assert until(lambda: link.is_ready)
    report(connection, 0, ahead=-3.0)
    for late in (1.0, 4.0):  # on the way for so long
        report(connection, 0, ahead=-3.0 - late)
    assert until(lambda: len(link.delays) == 3)
    assert link.clock_shift == pytest.approx(3.0, abs=0.5)
    assert server.links[1].clock_shift == 0.0


def test_a_report_has_the_time_of_its_host() -> None:
    before = time.time()
    sent = FROM_AGENT.validate_json(encode(Report(1, NodeState())))
    assert isinstance(sent, Report) and before <= sent.clock <= time.time()
