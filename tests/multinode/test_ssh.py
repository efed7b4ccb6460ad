"""Launches over ssh on two hosts, both this machine: the planned layout, nothing left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.multinode.daemons import free_ports
from tests.multinode.ssh_hosts import SshHosts
from tests.multinode.ssh_launch import ENDLESS, SshRun, kill, ssh_arguments, ssh_launch
from tests.run.launch.command import Launched, end_all, start, wait_for
from tests.run.launch.test_terminal import Terminal
from tests.train.runtime.tiny import column, make_data, tiny_job, train

pytestmark = pytest.mark.cluster("ssh")
TP_DP, TP_PP = ("--tp", "2", "--dp", "2"), ("--tp", "2", "--pp", "2")


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> object:
    yield
    end_all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("ssh-data"))


@pytest.fixture(scope="module")
def one_process(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return column(train(tiny_job(data), tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize("layout", [TP_DP, TP_PP], ids=["tp2-dp2", "tp2-pp2"])
def test_two_hosts_train_as_one_process(
    ssh_hosts: SshHosts, data: Path, one_process: list[float], tmp_path: Path, layout: tuple[str]
) -> None:
    run = ssh_launch(ssh_hosts, data, tmp_path / "run", *layout, "--json").at_step(2)
    assert run.hosts_of_ranks() == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    assert run.ended().code == 0, run.launched.stderr
    assert run.launched.losses == pytest.approx(one_process, rel=1e-5)
    assert run.recorded_hosts() == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    assert all(rank["agrees"] for rank in run.launched.summary["plan_beside_run"])
    run.require_nothing_left(5)


def test_node_i_is_the_i_th_host_of_the_list(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    """Also where the hosts are listed in another order, and the first has no place in the plan."""
    hostfile = ssh_hosts.hostfile("n2 slots=2", "n1 slots=2")
    run_dir = tmp_path / "run"
    argv = [*ssh_arguments(ssh_hosts, hostfile, data, run_dir), *TP_PP, *ENDLESS]
    run = SshRun(start(argv, run_dir)).at_step(2)
    assert run.hosts_of_ranks() == run.recorded_hosts() == {0: "n2", 1: "n2", 2: "n1", 3: "n1"}
    kill(run.launched.process, signal.SIGTERM)
    assert run.ended().code == 128 + signal.SIGTERM
    run.require_nothing_left(5)


@pytest.mark.parametrize(
    ("kind", "number", "words"),
    [
        ("agent", signal.SIGKILL, "host n2 (node 1): its node agent ended"),
        ("torchrun", signal.SIGKILL, "torchrun on host n2, with its ranks, was killed by signal 9"),
        ("rank", signal.SIGKILL, "rank 3 on host n2"),
        ("rank", signal.SIGTERM, "killed by signal 15 (SIGTERM)"),
    ],
)
def test_a_killed_process_of_a_host_is_named_with_the_host(
    ssh_hosts: SshHosts, data: Path, tmp_path: Path, kind: str, number: signal.Signals, words: str
) -> None:
    run = ssh_launch(ssh_hosts, data, tmp_path / "run", *TP_DP, *ENDLESS).at_step(2)
    kill(run.rank(3) if kind == "rank" else run.on_host(kind, "n2"), number)
    assert run.ended().code == 1
    said = run.launched.stderr.rpartition("✗")[2]
    assert words in " ".join(said.split()) and "n2" in said
    run.require_nothing_left(5)


def test_a_stopped_agent_ends_once_it_is_continued(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    """It is all that stays: its ranks end when they have lost their peers."""
    run = ssh_launch(ssh_hosts, data, tmp_path / "run", *TP_DP, *ENDLESS).at_step(2)
    agent = run.on_host("agent", "n2")
    kill(agent, signal.SIGSTOP)
    assert run.ended().code == 1
    assert "n2 (node 1): it has not answered for 20 s" in run.launched.stderr.rpartition("✗")[2]
    wait_for(lambda: not {"torchrun", "rank", "ssh"} & run.processes().keys(), 10)
    assert run.processes()["agent"] == [agent]
    kill(agent, signal.SIGCONT)
    run.require_nothing_left(5)


def test_a_full_disk_is_named_before_the_ranks_that_it_ended(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        settings = ("training.steps=100000", "checkpoint.interval=5", "checkpoint.keep_last=1")
        more = [part for setting in settings for part in ("--set", setting)]
        run = ssh_launch(ssh_hosts, data, disk / "run", *TP_DP, *more).at_step(6)
        with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.write(bytes(1 << 16)):
                pass
        assert run.ended().code == 1
        said = " ".join(run.launched.stderr.rpartition("✗")[2].split())
        assert f"the disk of {disk / 'run'} is full: No space left on device" in said
        run.require_nothing_left(5)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "mpctl-test", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_killed_launcher_takes_everything_with_it(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    run = ssh_launch(ssh_hosts, data, tmp_path / "run", *TP_DP, *ENDLESS).at_step(2)
    kill(run.launched.process)
    run.require_nothing_left(10)


def test_a_stopped_launcher_is_not_waited_for(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    """Ctrl-Z, or a laptop asleep: agents end their ranks when they have heard nothing for 20 s."""
    run = ssh_launch(ssh_hosts, data, tmp_path / "run", *TP_DP, *ENDLESS).at_step(2)
    kill(run.launched.process, signal.SIGSTOP)
    wait_for(lambda: not {"agent", "torchrun", "rank"} & run.processes().keys(), 35)
    kill(run.launched.process, signal.SIGCONT)
    assert run.ended().code == 1
    said = " ".join(run.launched.stderr.rpartition("✗")[2].split())
    assert said.startswith("the launcher did not run for ")
    assert "and hosts end their ranks after 20 s without it (launch.silence_seconds)" in said
    run.require_nothing_left(5)


def test_a_launcher_may_be_stopped_for_less_than_its_silence(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    silence = ("--set", "launch.silence_seconds=60")
    run = ssh_launch(ssh_hosts, data, tmp_path / "run", *TP_DP, *ENDLESS, *silence).at_step(2)
    kill(run.launched.process, signal.SIGSTOP)
    before = len(run.launched.records)
    time.sleep(30)
    meanwhile = len(run.launched.records)
    assert meanwhile > before + 2
    kill(run.launched.process, signal.SIGCONT)
    run.at_step(meanwhile + 5)
    kill(run.launched.process, signal.SIGTERM)
    run.ended()
    assert run.launched.summary["status"] == "stopped", run.launched.stderr
    assert run.launched.summary["attempts"] == 1
    assert "launch.silence_seconds" not in run.launched.stderr
    run.require_nothing_left(5)


def test_training_goes_on_without_its_ssh_clients(
    ssh_hosts: SshHosts, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    run = ssh_launch(ssh_hosts, data, tmp_path / "run", *TP_DP).at_step(1)
    for client in run.processes()["ssh"]:
        kill(client)
    assert run.ended().code == 0, run.launched.stderr
    assert run.launched.losses == pytest.approx(one_process, rel=1e-5)
    run.require_nothing_left(5)


def test_closing_the_terminal_saves_and_leaves_nothing(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    hostfile = ssh_hosts.hostfile("n1 slots=2", "n2 slots=2")
    argv = [*ssh_arguments(ssh_hosts, hostfile, data, run_dir), *TP_DP, *ENDLESS]
    terminal = Terminal(argv, run_dir, 80, "utf-8")
    try:
        run = SshRun(terminal.run).at_step(2)
    finally:
        terminal.close()
    run.ended().require_nothing_left(5)
    summary = run.launched.summary
    assert (summary["status"], summary["signal"]) == ("stopped", signal.SIGHUP)
    assert summary["checkpoint"] == summary["steps"]


def test_a_host_whose_agent_was_killed_is_connected_again(
    ssh_hosts: SshHosts, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    more = ("--set", "launch.max_restarts=1", "--set", "checkpoint.interval=5")
    run = ssh_launch(ssh_hosts, data, tmp_path / "run", *TP_DP, *more).at_step(6)
    kill(run.on_host("agent", "n2"))
    assert run.ended().code == 0, run.launched.stderr
    assert run.launched.summary["attempts"] == 2
    assert run.launched.losses == pytest.approx(one_process, rel=1e-5)
    run.require_nothing_left(5)


def test_a_host_that_is_gone_ends_the_run(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    """Once it has been tried again for launch.start_seconds."""
    # a busy machine may start so slowly that the first attempts are given up too
    more = ("--set", "launch.max_restarts=3", "--set", "launch.start_seconds=10", *ENDLESS)
    run = ssh_launch(ssh_hosts, data, tmp_path / "run", *TP_DP, *more).at_step(2)
    ssh_hosts.stop("n2")  # with every process of its logins
    assert run.ended().code == 1
    assert "not started again: n2: nothing listens" in run.launched.stderr.rpartition("✗")[2]
    run.require_nothing_left(5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_while_hosts_are_contacted_leaves_nothing(
    ssh_hosts: SshHosts, data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ssh_hosts.add_alias("silent", HostName="127.0.0.1", Port=silent.getsockname()[1])
        hostfile, run_dir = ssh_hosts.hostfile("n1 slots=2", "silent slots=2"), tmp_path / "run"
        argv = ssh_arguments(ssh_hosts, hostfile, data, run_dir)
        more = ("--set", "launch.ssh.connect_timeout=100")
        run = SshRun(start([*argv, *TP_DP, *more], run_dir))
        wait_for(lambda: run.processes().get("agent"))
        kill(run.launched.process, number)
        assert run.ended().code in (number, 128 + number)
    assert "no rank was started" in run.launched.stderr
    assert not run_dir.exists()
    run.require_nothing_left(5)


# ---------------------------------------------------------------- refused before anything starts


def refused(hosts: SshHosts, data: Path, run_dir: Path, *more: str, lines: list[str]) -> Launched:
    """A launch that exits with code 2 and leaves neither a run directory nor a process."""
    argv = [*ssh_arguments(hosts, hosts.hostfile(*lines), data, run_dir), *TP_DP, *more]
    run = start(argv, run_dir).ended()
    assert run.process.returncode == 2, run.stderr
    assert not run_dir.exists()
    SshRun(run).require_nothing_left(5)
    return run


def test_all_hosts_that_cannot_be_used_are_named_at_once(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    here = {"HostName": "127.0.0.1", "Port": ssh_hosts.hosts["n1"].port}
    ssh_hosts.add_alias("r1", HostName="127.0.0.1", Port=free_ports(1)[0])
    ssh_hosts.add_alias("r2", HostName="no-such-host.invalid")
    ssh_hosts.add_alias("r3", **here, UserKnownHostsFile="/dev/null")
    lines = ["n1 slots=1", "r1", "r2", "r3"]
    layout = ("--set", "cluster.nodes=4", "--set", "cluster.gpus_per_node=1", "--tp", "1", "--dp", "4")
    run = refused(ssh_hosts, data, tmp_path / "run", *layout, lines=lines)
    rules = [word for word in ("ssh-refused", "ssh-unknown-name", "ssh-unknown-host-key") if f"[{word}]" in run.stderr]
    assert len(rules) == 3, run.stderr
    for host in ("r1", "r2", "r3"):
        assert f"✗ {host}: " in run.stderr
    assert "✗ n1" not in run.stderr


def test_doubled_hosts_and_wrong_slots_are_named_before_any_host_is_contacted(
    ssh_hosts: SshHosts, data: Path, tmp_path: Path
) -> None:
    lines = ["n1 slots=2", "n1 slots=2", "n2 slots=x"]
    run = refused(ssh_hosts, data, tmp_path / "run", lines=lines)
    assert "n1 is already in line 1" in run.stderr
    assert "slots=x is not a number" in run.stderr
    few = refused(ssh_hosts, data, tmp_path / "few", lines=["n1 slots=2"])
    assert "1 host, but the plan has 2 nodes" in few.stderr
    slots = refused(ssh_hosts, data, tmp_path / "slots", lines=["n1 slots=2", "n2 slots=3"])
    assert "n2 has 3 slots, but the plan puts 2 ranks on each node" in slots.stderr


def test_a_host_that_does_not_share_the_run_directory_is_refused(
    ssh_hosts: SshHosts, data: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "runs"
    shared.mkdir()
    ssh_hosts.restart("n2", hide=shared)
    run = refused(ssh_hosts, data, shared / "run", lines=["n1 slots=2", "n2 slots=2"])
    assert "✗ n2: does not see the run directory" in run.stderr
    assert "run-dir-not-shared" in run.stderr


def test_versions_that_differ_are_refused(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    metadata = tmp_path / "other" / "torch-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\n[ $MPCTL_TEST_HOST = n2 ] && export PYTHONPATH={tmp_path}/other:$PYTHONPATH\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    wrong = ("--set", f"launch.ssh.python={python}")
    run = refused(ssh_hosts, data, tmp_path / "run", *wrong, lines=["n1 slots=2", "n2 slots=2"])
    assert "different versions of torch" in run.stderr
    assert "9.9.9 on n2" in run.stderr


def test_a_remote_python_without_mpctl_is_named(ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    lines = ["n1 slots=2", "n2 slots=2"]
    wrong = ("--set", f"launch.ssh.python={tmp_path}/python")
    run = refused(ssh_hosts, data, tmp_path / "run", *wrong, lines=lines)
    assert run.stderr.count("[remote-no-python]") == 2
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    wrong = ("--set", f"launch.ssh.python={bare}")
    run = refused(ssh_hosts, data, tmp_path / "run", *wrong, lines=lines)
    assert run.stderr.count("[remote-no-module]") == 2
