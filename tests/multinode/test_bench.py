"""`mpctl bench` over hosts that ssh reaches, and in a Slurm allocation; all are this machine."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpctl.records.rundir.directory import RunDir
from tests.measure.bench.small_jobs import SHAPE, small_settings
from tests.multinode.placement import recorded_hosts
from tests.multinode.slurm import SlurmCluster
from tests.multinode.slurm_launch import MPCTL, allocated
from tests.multinode.ssh_hosts import SshHosts
from tests.multinode.ssh_launch import SshRun, kill
from tests.run.launch.command import end_all, start, wait_for

SMALL: dict[str, Any] = {
    "model.family": "gpt",
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 8,
    "model.ffn": 128,
    "model.vocab": 64,
    "model.seq_length": 8,
    "training.micro_batch_size": 4,
    "launch.device": "cpu",
    "launch.timeout_seconds": 30,
}
HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
ENDLESS = ("--rounds", "100000")


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    end_all()


def sets(settings: dict[str, Any]) -> list[str]:
    """The settings as options."""
    return [word for k, v in settings.items() for word in ("--set", f"{k}={json.dumps(v)}")]


def modes(out: Path, *more: str) -> list[str]:
    """A bench of four ranks, which are one row and a square of two hosts with two ranks each."""
    settings = {**SMALL, "cluster.nodes": 2}
    return ["bench", "tensor-modes", "--ranks", "4", "--steps", "1", *sets(settings), "--out", str(out), *more]


def over_ssh(hosts: SshHosts, out: Path, *more: str) -> SshRun:
    """The same on n1 and n2."""
    hostfile = hosts.hostfile("n1 slots=2", "n2 slots=2")
    reach = ("--hostfile", str(hostfile), *sets({"launch.ssh.config": str(hosts.config)}))
    return SshRun(start(modes(out, *reach, *more), out))


def report(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "report.json").read_text())
    return document


@pytest.mark.cluster("ssh")
def test_ranks_of_two_hosts_measure_what_is_planned(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = over_ssh(ssh_hosts, out, "--rounds", "2", "--json").ended()
    assert run.code == 0, run.launched.stderr
    rows = report(out)["results"]
    assert report(out)["environment"]["host"] == "n1, n2"
    assert [row["mode"] for row in rows] == ["1d", "2d"]
    assert all(row["rounds"] == 2 and row["traffic"] == row["planned_traffic"] for row in rows)
    assert recorded_hosts(out / "ranks-r1") == HOSTS
    run.require_nothing_left(5)


@pytest.mark.cluster("ssh")
def test_ctrl_c_keeps_what_was_measured(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = over_ssh(ssh_hosts, out, *ENDLESS)
    wait_for(lambda: (out / "report.json").exists())
    run.launched.process.send_signal(signal.SIGINT)
    assert run.ended().code == 130, run.launched.stderr
    assert report(out)["results"] and not report(out)["is_complete"]
    run.require_nothing_left(5)


@pytest.mark.cluster("ssh")
@pytest.mark.parametrize("kind", ["agent", "rank"])
def test_a_lost_process_ends_the_bench_and_names_its_host(ssh_hosts: SshHosts, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    run = over_ssh(ssh_hosts, out, *ENDLESS)
    wait_for(lambda: (out / "report.json").exists())
    kill(run.rank(3) if kind == "rank" else run.on_host(kind, "n2"))
    assert run.ended().code == 1
    assert "n2" in run.launched.stderr.rpartition("✗")[2]
    run.require_nothing_left(5)


@pytest.mark.cluster("ssh")
def test_a_host_that_cannot_be_reached_starts_nothing(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    ssh_hosts.stop("n2")
    run = over_ssh(ssh_hosts, tmp_path / "out").ended()
    assert run.code == 2 and "n2" in run.launched.stderr
    assert not RunDir(tmp_path / "out" / "ranks-r1").is_occupied


@pytest.mark.cluster("ssh")
def test_collectives_within_and_between_hosts(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """Ranks of tp share a host and its memory, those of dp do not."""
    out, hostfile = tmp_path / "out", ssh_hosts.hostfile("n1 slots=2", "n2 slots=2")
    settings = {"launch.ssh.config": str(ssh_hosts.config), "launch.timeout_seconds": 30}
    argv = [
        "bench",
        "collectives",
        "--nodes",
        "2",
        "--gpus-per-node",
        "2",
        "--tp",
        "2",
        "--device",
        "cpu",
        *sets(settings),
        "--hostfile",
        str(hostfile),
        "-b",
        "4K",
        "-e",
        "64K",
        "-n",
        "2",
        "--rounds",
        "1",
        "--out",
        str(out),
        "--json",
    ]
    run = SshRun(start(argv, out)).ended()
    assert run.code == 0, run.launched.stderr
    rows = report(out)["results"]
    ways = {axis: {row["transport"] for row in rows if row["axis"] == axis} for axis in ("tp", "dp_cp")}
    assert ways == {"tp": {"gloo", "shared"}, "dp_cp": {"gloo"}}
    assert all(row["wrong"] == 0 for row in rows) and report(out)["is_complete"]
    assert recorded_hosts(out / "ranks-r1") == HOSTS
    run.require_nothing_left(5)


@pytest.mark.cluster("ssh")
def test_collectives_across_hosts_are_right(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """dp_cp crosses the hosts, which share no memory; tp has it."""
    out = tmp_path / "out"
    hostfile = ssh_hosts.hostfile("n1 slots=2", "n2 slots=2")
    settings = {"launch.ssh.config": str(ssh_hosts.config), "launch.device": "cpu"}
    argv = [
        "bench",
        "collectives",
        "--nodes",
        "2",
        "--gpus-per-node",
        "2",
        "--tp",
        "2",
        "--dp",
        "2",
        "-e",
        "4K",
        "-n",
        "2",
        "--rounds",
        "1",
        "--kinds",
        "all_reduce,all_to_all",
        *sets(settings),
        "--hostfile",
        str(hostfile),
        "--out",
        str(out),
        "--json",
    ]
    run = SshRun(start(argv, out)).ended()
    assert run.code == 0, run.launched.stderr
    rows = report(out)["results"]
    assert all(row["wrong"] == 0 for row in rows)
    ways = {(row["axis"], row["transport"]) for row in rows}
    assert {("tp", "shared"), ("dp_cp", "gloo")} <= ways and ("dp_cp", "shared") not in ways
    assert recorded_hosts(out / "ranks-r1") == HOSTS
    run.require_nothing_left(5)


@pytest.mark.cluster("ssh")
def test_training_runs_of_a_bench_go_to_the_hosts(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """bench verify of one job of two hosts: bytes and parameters as planned."""
    out, texts = tmp_path / "out", tmp_path / "texts"
    texts.write_text("a line of words that is read again and again\n" * 2000)
    hostfile = ssh_hosts.hostfile("n1 slots=2", "n2 slots=2")
    settings = {
        **small_settings(texts),
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 2,
        "parallel.tp": 2,
        "parallel.dp": 2,
        "training.steps": 4,
        "launch.ssh.config": str(ssh_hosts.config),
        "cluster.inter_node.bandwidth": 1e9,
        "cluster.inter_node.latency": 1e-4,
        "launch.timeout_seconds": 30,
    }
    argv = [
        "bench",
        "verify",
        "demo",
        *sets(settings),
        "--hostfile",
        str(hostfile),
        "--rounds",
        "1",
        "--out",
        str(out),
        "--json",
    ]
    run = SshRun(start(argv, out)).ended()
    assert run.code == 0, run.launched.stderr
    (row,) = report(out)["results"]
    assert report(out)["environment"]["host"] == "n1, n2"
    assert row["world_size"] == 4 and row["agrees"]
    (folder,) = out.glob("*-r1")
    assert recorded_hosts(folder) == HOSTS
    run.require_nothing_left(5)


@pytest.mark.cluster("slurm")
def test_ranks_of_an_allocation_measure(slurm: SlurmCluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [*MPCTL, *modes(out, "--on", "slurm", "--rounds", "1")]
    run = allocated(slurm, command, out)
    assert run.ended() == 0, run.output()
    assert [row["mode"] for row in report(out)["results"]] == ["1d", "2d"]
    assert recorded_hosts(out / "ranks-r1") == HOSTS
    run.require_nothing_left(5)


@pytest.mark.cluster("slurm")
def test_outside_of_an_allocation_it_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [*MPCTL, *modes(out, "--on", "slurm")], capture_output=True, text=True, env=slurm.env, timeout=100
    )
    assert done.returncode == 2 and "allocation" in done.stderr and not out.exists()


@pytest.mark.cluster("ssh")
def test_layouts_of_fewer_ranks_take_the_first_slots(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """bench scaling of 1, 2 and 4 ranks over two hosts of two slots: one host for the first two."""
    out, texts = tmp_path / "out", tmp_path / "texts"
    texts.write_text("a line of words that is read again and again\n" * 2000)
    hostfile = ssh_hosts.hostfile("n1 slots=2", "n2 slots=2")
    settings = {
        **small_settings(texts),
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 2,
        "parallel.tp": 2,
        "training.steps": 3,
        "launch.ssh.config": str(ssh_hosts.config),
    }
    argv = [
        "bench",
        "scaling",
        "demo",
        "--world",
        "1,2,4",
        "--mode",
        "strong",
        "--rounds",
        "1",
        *sets(settings),
        "--hostfile",
        str(hostfile),
        "--out",
        str(out),
    ]
    run = SshRun(start(argv, out)).ended()
    assert run.code == 0, run.launched.stderr
    rows = report(out)["results"]
    assert [row["world_size"] for row in rows] == [1, 2, 4]
    found = [recorded_hosts(path) for path in sorted(out.glob("*-r1"))]
    assert sorted(found, key=len) == [{0: "n1"}, {0: "n1", 1: "n1"}, HOSTS]
    run.require_nothing_left(5)


@pytest.mark.cluster("ssh")
def test_kernels_are_those_of_the_host(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    out, hostfile = tmp_path / "out", ssh_hosts.hostfile("n2 slots=4")
    settings = {f"model.{key}": value for key, value in SHAPE.items()}
    own = sets({**settings, "launch.ssh.config": str(ssh_hosts.config)})
    argv = [
        "bench",
        "kernels",
        "--quick",
        "--rounds",
        "1",
        "--ranks",
        "1,2",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        *own,
        "--hostfile",
        str(hostfile),
        "--out",
        str(out),
    ]
    run = SshRun(start(argv, out)).ended()
    assert run.code == 0, run.launched.stderr
    found = report(out)
    assert found["environment"]["host"] == "n2"
    assert {row["ranks"] for row in found["results"]} == {1, 2}
    assert recorded_hosts(out / "ranks-r1") == {0: "n2", 1: "n2"}
    run.require_nothing_left(5)
