"""Hosts that are lost and come back: again and again, late, unfit, or never."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from mpctl.errors import Issue
from mpctl.launch.control import cluster as cluster_module
from mpctl.launch.control.cluster import AgentCluster, AgentOrder, agent_cluster
from mpctl.launch.control.handshake import read_key
from mpctl.launch.control.messages import Connection, Hello
from mpctl.launch.control.returning import ReturnPolicy
from mpctl.launch.node.facts import HostFacts, host_facts
from mpctl.launch.node.machine import Machine
from mpctl.rundir.directory import RunDir
from mpctl.spec.load import load_job
from tests.launch.control.agents import LocalAgents
from tests.launch.control.peers import SECONDS, open_socket, until
from tests.runtime.tiny import tiny_plan

NAMES = ["n0", "n1", "n2"]
GPUS = replace(host_facts(), machine=Machine(8, 4, 2**40))


@dataclass
class Peers:
    """An AgentStarter that connects hosts from this process. facts: what each says of itself; down:
    those that do not come."""

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
        return {n: Issue("away", NAMES[n], "the host did not answer") for n in self.failed}

    def end(self) -> None:
        for connection in self.connections.values():
            connection.socket.close()


class World:
    """Three connected hosts of four GPUs, checked for a plan of as many."""

    def __init__(self, cluster: AgentCluster, events: list[str]) -> None:
        self.cluster, self.events = cluster, events
        self.peers = cast(Peers, cluster.starter)

    def lose(self, node: int) -> None:
        self.peers.connections[node].socket.close()
        assert until(lambda: self.cluster.server.links[node].lost)

    def used(self) -> list[int]:
        return [link.node for link in self.cluster.links]

    def said(self) -> str:
        return "\n".join(self.events)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(cluster_module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(cluster_module, "RETURN_PATIENCE", 0.5)
    job = load_job(None, {"cluster.nodes": 3, "cluster.gpus_per_node": 4, "parallel.dp": 12})
    events: list[str] = []
    run = RunDir(tmp_path / "run")
    made = agent_cluster(
        NAMES, run, lambda order: Peers(order, {}, set()), events.append, patience=6,
        addresses=["127.0.0.1"],
    )  # fmt: skip
    with made as cluster:
        assert cluster.check(tiny_plan(job), "cuda") == []
        yield World(cluster, events)


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


def test_an_elastic_run_goes_on_without_it_and_takes_it_back(world: World) -> None:
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
def test_an_unfit_host_stays_away_and_the_others_are_not_stopped(
    world: World, facts: HostFacts, words: str
) -> None:
    world.peers.down = {2}
    world.lose(2)
    assert world.cluster.recover(2) == []
    world.peers.down.clear()
    world.peers.facts[2] = facts
    world.cluster.next_try = 0.0
    returned = until(lambda: world.cluster.has_returned() or "back and not used" in world.said())
    if not words:  # nothing of a plan without a model is compared with its memory
        assert returned and "not used" not in world.said()
        return
    assert returned and words in world.said() and "asked again in 20 s" in world.said()
    assert not world.cluster.has_returned() and world.used() == [0, 1]
    assert world.said().count("back and not used") == 1


def test_an_unfit_host_ends_a_run_that_needs_it_with_the_reason(world: World) -> None:
    world.lose(2)
    world.peers.facts[2] = replace(GPUS, torch="2.4.0")
    (issue,) = world.cluster.recover(3)
    assert issue.rule == "host-torch"


@pytest.mark.slow
def test_a_host_without_the_run_directory_is_not_used(tmp_path: Path) -> None:
    """A reboot without the mount: its agent cannot prove itself, and the run goes on without it."""

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


def test_the_pauses_of_a_host_double() -> None:
    policy = ReturnPolicy()
    assert [policy.note_loss(0, 0.0) for _ in range(4)] == [0, 40, 80, 160]
    assert [policy.note_refusal(1, 0.0) for _ in range(3)] == [20, 40, 80]
    assert [policy.note_loss(0, 0.0) for _ in range(9)][-1] == 1800
    assert not policy.may_return(0, 1799) and policy.may_return(0, 1800)
    assert policy.may_return(7, 0.0)
