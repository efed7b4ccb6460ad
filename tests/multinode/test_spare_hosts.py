"""Spare hosts, blamed hosts and hosts that fail their check, over real ssh and Slurm: which hosts
the next attempt uses, and that its losses are those of an undisturbed run."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.multinode.daemons import descendants, wait_until
from tests.multinode.slurm import SlurmCluster
from tests.multinode.slurm_launch import SlurmRun, allocated, launch_arguments, submitted
from tests.multinode.ssh_hosts import SshHosts
from tests.multinode.ssh_launch import SshRun, kill, ssh_arguments
from tests.run.launch.command import end_all, start, wait_for
from tests.train.runtime.tiny import column, make_data, tiny_job, train

AGENT = "mpctl.run.launch.node.agent"
DP = ("--tp", "1", "--dp", "2")
ONE_RANK = {"cluster__gpus_per_node": 1}
RESTARTS = {"launch.max_restarts": 4, "checkpoint.interval": 2}


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> object:
    yield
    end_all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("spare-data"))


@pytest.fixture(scope="module")
def one_process(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return column(train(tiny_job(data), tmp_path_factory.mktemp("one")))


def blamed(run: Path) -> dict[str, int]:
    """The failures that each host is blamed for."""
    document = json.loads((run / "nodes" / "blamed.json").read_text())
    return {host: entry["failures"] for host, entry in document["hosts"].items()}


# ---------------------------------------------------------------- over ssh


def spared(hosts: SshHosts, data: Path, run: Path, **settings: object) -> SshRun:
    """A launch of one rank on each of n1 and n2, with n3 as a spare host."""
    hostfile = hosts.hostfile("n1 slots=1", "n2 slots=1", "n3 slots=1")
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    given = {"cluster.gpus_per_node": 1, "launch.spare_nodes": 1, **RESTARTS, **dotted}
    sets = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    more = [part for one in sets for part in ("--set", one)]
    return SshRun(start([*ssh_arguments(hosts, hostfile, data, run), *DP, *more], run))


@pytest.mark.cluster("ssh")
def test_a_spare_host_takes_the_place_of_a_lost_one(
    three_ssh_hosts: SshHosts, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    """n1 is gone for good: n3 runs node 0, and n2 stays where it is."""
    run = spared(three_ssh_hosts, data, tmp_path / "run").at_step(3)
    assert run.recorded_hosts() == {0: "n1", 1: "n2"}
    three_ssh_hosts.stop("n1")
    assert run.ended().code == 0, run.launched.stderr
    assert run.recorded_hosts() == {0: "n3", 1: "n2"}
    assert "n3 takes the place of n1 (node 0)" in " ".join(run.launched.stderr.split())
    assert run.launched.losses == pytest.approx(one_process, rel=1e-5)
    assert blamed(run.run_dir) == {"n1": 1}
    launcher = json.loads((run.run_dir / "launcher.json").read_text())
    assert launcher["hosts"] == ["n3", "n2"]
    run.require_nothing_left(5)


@pytest.mark.cluster("ssh")
def test_losses_are_the_same_bits_on_a_spare_host(three_ssh_hosts: SshHosts, data: Path, tmp_path: Path) -> None:
    undisturbed = spared(three_ssh_hosts, data, tmp_path / "calm").ended()
    run = spared(three_ssh_hosts, data, tmp_path / "run").at_step(3)
    kill(run.on_host("agent", "n2"))
    assert run.ended().code == 0, run.launched.stderr
    assert run.recorded_hosts() == {0: "n1", 1: "n3"}
    assert run.launched.losses == undisturbed.launched.losses


@pytest.mark.cluster("ssh")
def test_a_node_that_fails_twice_is_replaced(
    three_ssh_hosts: SshHosts, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    run = spared(three_ssh_hosts, data, tmp_path / "run").at_step(3)
    kill(run.rank(1))
    wait_for(lambda: (run.run_dir / "nodes" / "blamed.json").exists())
    assert blamed(run.run_dir) == {"n2": 1}
    wait_for(lambda: len(run.launched.losses) >= 7)
    assert run.hosts_of_ranks() == {0: "n1", 1: "n2"}  # one failure may be chance
    kill(run.rank(1))
    assert run.ended().code == 0, run.launched.stderr
    assert run.recorded_hosts() == {0: "n1", 1: "n3"}
    said = " ".join(run.launched.stderr.split())
    assert "n3 takes the place of n2 (node 1): blamed for 2 failures of this run" in said
    assert run.launched.losses == pytest.approx(one_process, rel=1e-5)
    assert blamed(run.run_dir) == {"n2": 2}


@pytest.mark.cluster("ssh")
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('mount -t tmpfs none "$0"', "does not see the run directory"),
        ('mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"', "cannot write into the run"),
    ],
)
def test_a_host_without_a_usable_run_directory_is_left_out(
    three_ssh_hosts: SshHosts, data: Path, one_process: list[float], tmp_path: Path, script: str, words: str
) -> None:
    """The file system of the run is gone from n2, or has become read-only there, when a rank of n1
    fails: n2 is found by the check of all hosts, not by a second failure."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    three_ssh_hosts.restart("n2", hide=hidden)  # with mounts of its own
    run = spared(three_ssh_hosts, data, tmp_path / "run").at_step(3)
    agent = run.on_host("agent", "n2")
    enter = ["nsenter", f"--target={agent.pid}", "--mount", "sh", "-c", script]
    subprocess.run([*enter, str(tmp_path / "run" / "nodes")], check=True)
    kill(run.rank(0))
    assert run.ended().code == 0, run.launched.stderr
    said = " ".join(run.launched.stderr.split())
    assert f"n3 takes the place of n2 (node 1): {words}" in said
    assert run.recorded_hosts() == {0: "n1", 1: "n3"}
    assert run.launched.losses == pytest.approx(one_process, rel=1e-5)


@pytest.mark.cluster("ssh")
def test_a_blamed_host_is_used_where_no_other_is_there_and_a_resumed_run_knows_it(
    three_ssh_hosts: SshHosts, data: Path, tmp_path: Path
) -> None:
    settings = {"launch__spare_nodes": 0, "launch__exclude_after": 1}
    run = spared(three_ssh_hosts, data, tmp_path / "run", **settings).at_step(3)
    kill(run.rank(1))
    assert run.ended().code == 0, run.launched.stderr
    said = " ".join(run.launched.stderr.split())
    assert "n2: blamed for 1 failure of this run (launch.exclude_after 1); used all" in said
    assert run.recorded_hosts() == {0: "n1", 1: "n2"}
    more = ["--resume", "--steps", "24", "--set", "launch.spare_nodes=1"]
    again = SshRun(start(["launch", "--run-dir", str(run.run_dir), *more], run.run_dir)).ended()
    assert again.code == 0, again.launched.stderr
    assert again.recorded_hosts() == {0: "n1", 1: "n3"}


# ---------------------------------------------------------------- in Slurm


@pytest.fixture
def slurm(slurm_of_three: SlurmCluster) -> Iterator[SlurmCluster]:
    yield slurm_of_three
    slurm_of_three.cancel_all()


@pytest.mark.cluster("slurm")
def test_a_spare_node_of_an_allocation_takes_over(
    slurm: SlurmCluster, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    settings = {**ONE_RANK, "launch__spare_nodes": 1, "checkpoint__interval": 2}
    command = launch_arguments(data, path, *DP, launch__max_restarts=2, **settings)
    run = allocated(slurm, command, path, nodes=3).at_step(3)
    assert len(run.find(AGENT, "n3")) > 0, "its agent waits"
    for process in run.find(AGENT, "n2"):
        process.kill()
    assert run.ended() == 0, run.output()
    assert run.recorded_hosts() == {0: "n1", 1: "n3"}
    assert run.losses == pytest.approx(one_process, rel=1e-5)
    run.require_nothing_left()


def kill_rank(run: SlurmRun, rank: int) -> None:
    """Kill a rank; there is one once the attempt has begun."""
    wait_until(lambda: rank in run.ranks(), 60, run.output)
    with_child = [*descendants(run.ranks()[rank].pid), run.ranks()[rank]]
    for process in with_child:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


@pytest.mark.cluster("slurm")
def test_a_node_that_fails_twice_is_excluded_by_the_requeue(
    slurm: SlurmCluster, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    """Without spare hosts: the first failure is tried again on the same node; the second ends the
    launch, and Slurm gives the job another node."""
    path = tmp_path / "run"
    settings = {**ONE_RANK, "launch__max_restarts": 4, "checkpoint__interval": 2}
    command = launch_arguments(data, path, *DP, launch__exclude_after=2, **settings)
    run = submitted(slurm, command, path).at_step(3)
    assert run.recorded_hosts() == {0: "n1", 1: "n2"}
    kill_rank(run, 1)
    wait_until(lambda: (path / "nodes" / "blamed.json").exists(), 60, run.output)
    assert blamed(path) == {"n2": 1}
    run.at_step(7)
    kill_rank(run, 1)
    run.finished(240)
    output = run.output()
    assert "n2 failed too often; step-" in output and "is requeued without n2" in output
    assert f"job {run.job} on n[1,3], restart 1, from step-" in output
    assert run.recorded_hosts() == {0: "n1", 1: "n3"}
    assert "ExcNodeList=n2" in slurm.run(["scontrol", "show", "job", run.job]).stdout
    assert run.losses == pytest.approx(one_process, rel=1e-5)
    assert blamed(path) == {"n2": 2}
    assert (path / "nodes" / "excluded").read_text() == "n2\n"  # though n2 is not of this job
    run.require_nothing_left()


@pytest.mark.cluster("slurm")
def test_a_submission_asks_for_its_spare_nodes(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    command = [*launch_arguments(data, path, *DP, **ONE_RANK), "--submit", "--dry-run"]
    script = slurm.run([*command, "--set", "launch.spare_nodes=1"])
    assert "#SBATCH --nodes=3\n" in script.stdout, script.stderr
    refused = slurm.run([*command, "--set", "launch.spare_nodes=2"])
    assert refused.returncode == 2 and "4 nodes" in " ".join(refused.stderr.split())
