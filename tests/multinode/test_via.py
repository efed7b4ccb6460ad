"""A run that is submitted, watched, read and stopped from a machine without Slurm, by an ssh login
to a host of the cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cli.calls import Said
from tests.multinode.slurm import SlurmCluster
from tests.multinode.slurm_launch import LONG, TP_DP, SlurmRun, launch_arguments
from tests.multinode.ssh_hosts import SshHosts, loopback_hosts, path_of
from tests.run.launch.command import wait_for
from tests.train.runtime.tiny import column, make_data, tiny_job, train

pytestmark = [pytest.mark.cluster("slurm"), pytest.mark.cluster("ssh")]
VIA = ("--via", f"ssh:n1:{sys.executable}")


@dataclass
class Laptop:
    """This machine without the programs of Slurm, and with an ssh that knows the login host."""

    folder: Path
    hosts: SshHosts

    @property
    def environment(self) -> dict[str, str]:
        """PATH has ssh alone, and SLURM_CONF is missing."""
        return {"PATH": str(self.folder), "HOME": str(self.folder)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`mpctl` with these arguments and the login host."""
        words = [sys.executable, "-m", "mpctl", *arguments, *VIA]
        return subprocess.Popen(
            words,
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def mpctl(self, *arguments: str) -> Said:
        """The same, to its end."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=120)
        return Said(process.returncode, out, err)


@pytest.fixture
def laptop(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Laptop]:
    with loopback_hosts(tmp_path / "ssh", ("n1",)) as hosts:
        hosts.restart("n1", env={"SLURM_CONF": slurm.env["SLURM_CONF"], "PATH": slurm.env["PATH"]})
        folder = tmp_path / "laptop"
        folder.mkdir()
        ssh = folder / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {path_of("ssh")} -F "{hosts.config}" "$@"\n')
        ssh.chmod(0o755)
        yield Laptop(folder, hosts)
        slurm.cancel_all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("via-data"))


def submitted(slurm: SlurmCluster, laptop: Laptop, data: Path, run: Path, *more: str) -> SlurmRun:
    """A run submitted from the laptop."""
    words = launch_arguments(data, run, *TP_DP, *more)
    said = laptop.mpctl(*words[words.index("launch") :], "--submit", "--json")
    assert said.code == 0, said.err
    assert said.document["run_dir"] == str(run)
    return SlurmRun(slurm, run, job=said.document["job_id"])


def test_a_run_from_a_laptop_trains_as_every_other(
    slurm: SlurmCluster, laptop: Laptop, data: Path, tmp_path: Path
) -> None:
    run = submitted(slurm, laptop, data, tmp_path / "a 'run'").finished()
    expected = column(train(tiny_job(data), tmp_path / "one"))
    assert run.losses == pytest.approx(expected, rel=1e-5)
    assert all(rank["agrees"] for rank in run.summary["plan_beside_run"])
    listed = laptop.mpctl("runs", str(tmp_path), "--json").document
    assert [row["status"] for row in listed["runs"] if row["name"] == "a 'run'"] == ["finished"]


def test_it_is_watched_read_and_stopped_from_there(
    slurm: SlurmCluster, laptop: Laptop, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    run = submitted(slurm, laptop, data, path, *LONG).at_step(1)
    status = laptop.mpctl("status", str(path), "--json").document
    assert (status["status"], status["launcher"]["job_id"]) == ("running", run.job)
    follower = laptop.start("logs", "--follow", str(path))
    assert follower.stdout is not None
    wait_for(lambda: "step" in follower.stdout.readline(), 60)
    far = [p for p in psutil.process_iter() if _is_follower(p, laptop)]
    assert far
    follower.send_signal(signal.SIGINT)
    _, stderr = follower.communicate(timeout=30)
    assert follower.returncode == 130, stderr
    assert psutil.wait_procs(far, timeout=10)[1] == []
    assert slurm.jobs()[run.job] == "RUNNING"
    stopped = laptop.mpctl("stop", str(path))
    assert stopped.code == 0, stopped.out + stopped.err
    assert [*(path / "checkpoints").glob("step-*")], "it saved where it stopped"
    run.require_nothing_left()


def _is_follower(process: psutil.Process, laptop: Laptop) -> bool:
    try:
        daemon = laptop.hosts.hosts["n1"].daemon
        parents = [parent.pid for parent in process.parents()]
        return "mpctl.cli.relayed" in process.cmdline() and daemon is not None and daemon.process.pid in parents
    except psutil.Error:
        return False


def test_what_slurm_there_refuses_is_said_here(slurm: SlurmCluster, laptop: Laptop, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = launch_arguments(data, path, *TP_DP, launch__slurm__partition="gpus")
    launch = words[words.index("launch") :]
    here, there = (slurm.run([*words, "--submit", "--json"]), laptop.mpctl(*launch, "--submit", "--json"))
    assert there.code == here.returncode == 2
    assert there.document == json.loads(here.stdout)
    script = laptop.mpctl(*launch[:-1], "2", "--submit", "--dry-run", "--set", "launch.slurm.partition=main")
    assert script.out.startswith("#!/bin/bash\n") and "not compared" not in script.out
    assert not path.exists()


def test_a_login_host_without_slurm_or_mpctl(laptop: Laptop, data: Path, tmp_path: Path) -> None:
    laptop.hosts.restart("n1", env={"PATH": "/nowhere"})
    words = launch_arguments(data, tmp_path / "run", *TP_DP)
    said = laptop.mpctl(*words[words.index("launch") :], "--submit", "--json")
    assert said.code == 2 and "no-slurm" in said.issues
    process = subprocess.run(
        [sys.executable, "-m", "mpctl", "runs", "--json", "--via", "ssh:n1:/nowhere/python"],
        env=laptop.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "remote-no-python" in process.stdout
    laptop.hosts.stop("n1")
    assert "ssh-refused" in laptop.mpctl("runs", "--json").issues
