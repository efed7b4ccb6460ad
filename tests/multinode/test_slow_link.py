"""A link that loses its speed while a run trains over two hosts is named, with both hosts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpctl.records.rundir.slow import SlowPart, read_slow
from mpctl.records.rundir.step_log import WINDOW
from mpctl.run.history.status import status_of
from tests.multinode.needs import program
from tests.multinode.ssh_hosts import SshHosts
from tests.multinode.ssh_launch import ENDLESS, SshRun, ssh_launch
from tests.run.launch.command import PATIENCE, end_all, wait_for
from tests.train.runtime.tiny import make_data

pytestmark = [pytest.mark.cluster("ssh"), pytest.mark.cluster("netns")]
RATE = "1mbit"
"""Of the link: gradients of 100 KiB a step take a second."""


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("ssh-data"))


def limit(hosts: SshHosts, name: str) -> None:
    """Let no more than RATE through to a host: a token bucket at the launcher's end of its link."""
    tc = program("tc")
    if tc is None:
        pytest.skip("no tc (apt-get install iproute2)")
    bucket = ["tbf", "rate", RATE, "burst", "8kb", "latency", "1s"]
    command = [tc, "qdisc", "add", "dev", hosts.hosts[name].link, "root", *bucket]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the kernel has no token bucket: {done.stderr.strip()}")


def slow(run: SshRun) -> list[SlowPart]:
    return list(read_slow(run.run_dir / "slow.jsonl"))


@pytest.mark.parametrize("layout", [("--dp", "2"), ("--set", "parallel.pp=2")], ids=["data", "pipeline"])
def test_a_slow_link_is_named(namespaces: SshHosts, data: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    run = ssh_launch(namespaces, data, tmp_path / "run", "--tp", "2", *layout, *ENDLESS).at_step(2 * WINDOW)
    assert slow(run) == []
    onset = len(run.launched.records)
    limit(namespaces, "n2")
    wait_for(lambda: slow(run), 3 * PATIENCE)
    found = slow(run)
    print(onset, *(part.text for part in found), sep="\n")
    assert {part.kind for part in found} == {"link"}
    assert all(set(part.hosts) == {"n1", "n2"} for part in found)
    assert all(part.named <= onset + 20 for part in found)
    wait_for(lambda: "times as long as before for messages of" in run.launched.stderr)
    (first, *_) = wait_for(lambda: status_of(run.run_dir, "run")["slow"])
    assert first["kind"] == "link"
