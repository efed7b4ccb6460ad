"""Hosts looked at through node agents: two agents on this machine, taken for two hosts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mpctl.core.errors import InputError, Issue
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.records.rundir.directory import RunDir
from mpctl.run.doctor.documents import ProbeRequest
from mpctl.run.doctor.examine import Examination, examine
from mpctl.run.doctor.hosts import AgentHosts, connected_hosts, scratch_run
from mpctl.run.doctor.job import Needs
from mpctl.run.hosts.machine import host_facts
from mpctl.run.launch.cluster import Cluster
from mpctl.run.launch.control.cluster import AgentOrder, agent_cluster
from mpctl.run.launch.control.messages import Hello, outer_addresses
from mpctl.run.launch.launch_plan import HostCommand, LaunchPlan
from tests.run.launch.control.agents import LocalAgents


@dataclass
class TwoAgents:
    """A backend whose two hosts n0 and n1 are agents on this machine."""

    name: str = "ssh"
    job_id: str | None = None
    issues: list[Issue] = field(default_factory=list)
    starters: list[LocalAgents] = field(default_factory=list)

    def check(self, plan: Plan) -> list[Issue]:
        return self.issues

    @contextmanager
    def connect(self, plan: Plan, run: RunDir, on_event: object) -> Iterator[Cluster]:
        with agent_cluster(["n0", "n1"], run, self._starter, print, patience=60) as cluster:
            yield cluster

    def commands(self, plan: LaunchPlan) -> list[HostCommand]:
        return []

    def _starter(self, order: AgentOrder) -> LocalAgents:
        self.starters.append(LocalAgents(order))
        return self.starters[-1]


PLAN = load_plan(None, {"cluster.nodes": 2})


@contextmanager
def agents(folder: Path, backend: TwoAgents | None = None) -> Iterator[AgentHosts]:
    with connected_hosts(backend or TwoAgents(), PLAN, folder, print) as hosts:
        assert isinstance(hosts, AgentHosts)
        yield hosts


def hello(local: str, remote: str) -> Hello:
    return Hello("n", host_facts(), None, local, remote)


def test_the_address_of_the_launchers_host_is_where_others_reach_it() -> None:
    hellos = [hello("127.0.0.1", "127.0.0.1"), hello("10.0.0.2", "10.0.0.1")]
    assert outer_addresses(hellos) == ["10.0.0.1", "10.0.0.2"]
    assert outer_addresses(hellos[:1]) == ["127.0.0.1"]


def test_two_hosts_report_measure_each_other_and_one_is_lost(tmp_path: Path) -> None:
    """Facts without torch, and the pair; nothing is left of agents and folders."""
    runs, backend, probe = tmp_path / "some" / "runs", TwoAgents(), "mpctl.run.doctor.probe"
    with agents(runs, backend) as hosts:
        wanted = Examination("ssh", runs, Needs(nodes=2), torch=False)
        is_asked_meanwhile(hosts, ProbeRequest(torch_seconds=0, loopback=True))
        refused = hosts.run("http.server", [ProbeRequest()] * 2, 10)
        diagnosis = examine(hosts, wanted, lambda *_: None)
        os.kill(backend.starters[0].processes[1].pid, signal.SIGKILL)
        requests = [ProbeRequest(torch_seconds=0, loopback=False)] * 2
        alive, lost = hosts.run(probe, requests, 30)
    assert [host.host for host in diagnosis.hosts] == ["n0", "n1"]
    assert all(host.folder and host.folder.is_shared for host in diagnosis.hosts)
    assert all(host.network and host.network.towards == "lo" for host in diagnosis.hosts)
    (pair,) = diagnosis.pairs
    assert (pair.first, pair.second, pair.error) == (0, 1, None)
    assert len(diagnosis.connect_seconds) == 2
    assert all(0 < seconds < 60 for seconds in diagnosis.connect_seconds)
    assert not diagnosis.has_errors
    assert all("http.server is not a module of mpctl" in answer.errors for answer in refused)
    assert alive.code == 0
    assert (lost.code, lost.errors) == (None, "its node agent ended")
    assert list(tmp_path.iterdir()) == []
    (starter,) = backend.starters
    assert all(process.poll() is not None for process in starter.processes.values())


def is_asked_meanwhile(hosts: AgentHosts, slow: ProbeRequest) -> None:
    """A request must not keep the agent from answering other requests and from reporting."""
    began = time.monotonic()
    first = threading.Thread(target=hosts.run, args=("mpctl.run.doctor.probe", [slow] * 2, 30))
    first.start()
    port = hosts.cluster.server.request(0, "free_port").result(10)
    waited = time.monotonic() - began
    assert port > 0
    assert first.is_alive(), f"the port came after {waited:.1f} s, when the probe had ended"
    first.join()


def test_what_the_backend_refuses_is_refused_before_anything_starts(tmp_path: Path) -> None:
    backend = TwoAgents(issues=[Issue("too-few-hosts", "hosts", "1 host, the plan has 2 nodes")])
    with pytest.raises(InputError, match="1 host"), agents(tmp_path, backend):
        pass
    assert backend.starters == []


def test_a_scratch_directory_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with scratch_run(tmp_path / "runs" / "deep" / "er") as run:
        assert run.path.is_dir()
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]
    with pytest.raises(InputError, match="cannot"), scratch_run(Path("/proc/x")):
        pass
