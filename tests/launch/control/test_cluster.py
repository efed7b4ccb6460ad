"""Training over node agents: two of them on this machine, taken for two hosts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from mpctl.errors import InputError
from mpctl.launch.control import server
from mpctl.launch.control.cluster import AgentCluster, AgentOrder, agent_cluster
from mpctl.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.launch.node.machine import Machine
from mpctl.launch.set_up import set_up_run
from mpctl.launch.supervise import RunOutcome, run_launch
from mpctl.rundir.directory import RunDir
from mpctl.rundir.rank_files import StepRecord
from tests.launch.command import Launched
from tests.launch.control.agents import LocalAgents
from tests.runtime.tiny import tiny_job, tiny_plan

OnRecord = Callable[[StepRecord], None]


class Hosts:
    """Two hosts n0 and n1 and a run on them."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder)
        self.events: list[str] = []
        self.starter: LocalAgents

    def make_starter(self, order: AgentOrder) -> LocalAgents:
        self.starter = LocalAgents(order)
        return self.starter

    @contextmanager
    def connected(self) -> Iterator[AgentCluster]:
        make, event = self.make_starter, self.events.append
        with agent_cluster(["n0", "n1"], self.run, make, event, patience=60) as cluster:
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
    "victim",
    [
        "agent",
        pytest.param("torchrun", marks=pytest.mark.slow),
        pytest.param("rank", marks=pytest.mark.slow),
    ],
)
def test_a_killed_end_is_named_and_the_run_goes_on(
    data: Path, finished: Launched, hosts: Hosts, victim: str
) -> None:
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
    words = {"agent": "host n1 (node 1): ", "torchrun": "torchrun on host n1, with its ranks, ",
             "rank": "rank 1 on host n1 "}  # fmt: skip
    assert hosts.events[0].startswith(words[victim]), hosts.events
    assert victim == "agent" or "killed by signal 9" in hosts.events[0], hosts.events
    records = list(hosts.run.records())
    assert [record["loss"] for record in records] == pytest.approx(finished.losses, rel=1e-6)
    assert not hosts.pids()


@pytest.mark.slow
def test_a_host_is_not_lost_while_its_ranks_have_not_started(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data may be prepared for minutes between the first contact and the first attempt."""
    monkeypatch.setattr(server, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(server, "PING_SECONDS", 0.2)
    with hosts.connected() as cluster:
        time.sleep(3.0)
        assert [link.lost for link in cluster.links] == ["", ""]


@pytest.mark.slow
def test_a_host_that_does_not_see_the_run_directory_is_refused(hosts: Hosts) -> None:
    def blind(order: AgentOrder) -> LocalAgents:
        return LocalAgents(AgentOrder(order.run, order.key.with_name("absent"), order.port))

    connected = agent_cluster(["n0", "n1"], hosts.run, blind, print, patience=60)
    with pytest.raises(InputError) as caught, connected:
        raise AssertionError("connected")
    rules = [issue.rule for issue in caught.value.issues]
    assert rules == ["run-dir-not-shared"] * 2 and "n0" in str(caught.value)
    assert not hosts.run.path.exists() and not hosts.pids()
