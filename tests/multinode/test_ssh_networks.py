"""Launches over ssh on hosts with addresses and links of their own (network namespaces)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.multinode.ssh_hosts import SshHosts
from tests.multinode.ssh_launch import ENDLESS, ssh_launch
from tests.run.launch.command import end_all
from tests.train.runtime.tiny import column, make_data, tiny_job, train

pytestmark = [pytest.mark.cluster("ssh"), pytest.mark.cluster("netns")]
DEAD_NODE_SECONDS = 35.0
LAYOUT = ("--tp", "2", "--dp", "2")


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> object:
    yield
    end_all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("ssh-data"))


def test_hosts_with_addresses_of_their_own_train_as_one_process(
    namespaces: SshHosts, data: Path, tmp_path: Path
) -> None:
    """gloo must take the interface that leads to the first host, not the loopback."""
    expected = column(train(tiny_job(data), tmp_path / "one"))
    run = ssh_launch(namespaces, data, tmp_path / "run", *LAYOUT).ended()
    assert run.code == 0, run.launched.stderr
    assert run.launched.losses == pytest.approx(expected, rel=1e-5)
    assert run.recorded_hosts() == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    run.require_nothing_left(5)


@pytest.mark.cluster("loss")
def test_lost_packets_cost_time_and_nothing_else(namespaces: SshHosts, data: Path, tmp_path: Path) -> None:
    """One in twenty of those between the hosts, and of those from the launcher."""
    expected = column(train(tiny_job(data), tmp_path / "one"))
    run = ssh_launch(namespaces, data, tmp_path / "run", *LAYOUT).at_step(2)
    namespaces.drop(0.05)
    run.ended()
    assert run.code == 0, run.launched.stderr
    assert run.launched.summary["attempts"] == 1
    assert run.launched.losses == pytest.approx(expected, rel=1e-5)
    run.require_nothing_left(5)


def test_a_cut_link_is_a_dead_node_and_both_sides_end(namespaces: SshHosts, data: Path, tmp_path: Path) -> None:
    more = ("--set", "launch.timeout_seconds=300")
    run = ssh_launch(namespaces, data, tmp_path / "run", *LAYOUT, *ENDLESS, *more).at_step(2)
    namespaces.cut("n2")
    cut = time.monotonic()
    run.ended()
    assert time.monotonic() - cut < DEAD_NODE_SECONDS
    assert run.code == 1
    assert "n2" in run.launched.stderr.rpartition("✗")[2]
    run.require_nothing_left(DEAD_NODE_SECONDS - (time.monotonic() - cut))


def test_a_link_that_is_away_for_longer_than_a_host_is_waited_for_costs_a_restart(
    namespaces: SshHosts, data: Path, tmp_path: Path
) -> None:
    """An ssh that is tried while the link is down gives up after launch.ssh.connect_timeout."""
    settings = ("launch.max_restarts=1", "launch.ssh.connect_timeout=3", "checkpoint.interval=2")
    more = [part for setting in settings for part in ("--set", setting)]
    expected = column(train(tiny_job(data), tmp_path / "one"))
    run = ssh_launch(namespaces, data, tmp_path / "run", *LAYOUT, *more).at_step(4)
    namespaces.cut("n2")
    time.sleep(DEAD_NODE_SECONDS)
    namespaces.mend("n2")
    run.ended()
    assert run.code == 0, run.launched.stderr
    assert run.launched.summary["attempts"] == 2
    assert run.launched.losses == pytest.approx(expected, rel=1e-5)
    run.require_nothing_left(5)
