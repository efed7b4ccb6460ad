"""Programs of other people on the hosts of a cluster: their place, their restarts, their stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpctl.records.rundir.directory import RunDir
from tests.multinode.slurm import SlurmCluster
from tests.multinode.slurm_launch import MPCTL, submitted
from tests.multinode.ssh_hosts import SshHosts
from tests.multinode.ssh_launch import SshRun
from tests.run.launch.command import end_all, start
from tests.run.launch.programs import run_program, trainer, write

WHERE = """\
import json, os
names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MPCTL_TP_GROUP", "MPCTL_DP_RANK")
print(json.dumps({name: os.environ[name] for name in names} | {"folder": os.getcwd()}))
"""
HOSTS = ("--nodes", "2", "--gpus-per-node", "2", "--tp", "2", "--dp", "2")
ALONE = ("--nodes", "2", "--gpus-per-node", "1", "--dp", "2")


def command(run_dir: Path, program: str, *more: str) -> list[str]:
    return ["launch", *more, "--device", "cpu", "--run-dir", str(run_dir), "--program", program]


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks of one host, over 1,500 steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    trainer(folder / "here")
    run = run_program(folder / "run", "python train.py 1500 0").ended()
    assert run.summary["status"] == "finished", run.stderr
    return run.losses


@pytest.mark.cluster("ssh")
def test_ranks_of_two_hosts_have_their_place_and_their_folder(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    here, run_dir = tmp_path / "he re", tmp_path / "run"
    write(here, "where.py", WHERE)
    over = (
        "--on",
        "ssh",
        "--hostfile",
        str(ssh_hosts.hostfile("n1 slots=2", "n2 slots=2")),
        "--set",
        f"launch.ssh.config={ssh_hosts.config}",
    )
    run = SshRun(start(command(run_dir, "python where.py", *HOSTS, *over), run_dir, cwd=here))
    assert run.ended().code == 0, run.launched.stderr
    said = [json.loads(RunDir(run_dir).log(rank).read_text()) for rank in range(4)]
    assert [s["RANK"] for s in said] == ["0", "1", "2", "3"]
    assert [s["LOCAL_RANK"] for s in said] == ["0", "1", "0", "1"]
    assert [s["MPCTL_TP_GROUP"] for s in said] == ["0,1", "0,1", "2,3", "2,3"]
    assert [s["MPCTL_DP_RANK"] for s in said] == ["0", "0", "1", "1"]
    assert {s["folder"] for s in said} == {str(here.resolve())}
    assert len({s["MASTER_ADDR"] for s in said}) == 1
    assert run.recorded_hosts() == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


@pytest.mark.cluster("ssh")
def test_a_program_that_fails_on_a_host_goes_on_there(
    ssh_hosts: SshHosts, undisturbed: list[float], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    trainer(tmp_path / "here")
    over = (
        "--on",
        "ssh",
        "--hostfile",
        str(ssh_hosts.hostfile("n1 slots=1", "n2 slots=1")),
        "--set",
        f"launch.ssh.config={ssh_hosts.config}",
        "--set",
        "launch.max_restarts=1",
    )
    argv = command(run_dir, "python train.py 1500 701", *ALONE, *over)
    run = SshRun(start(argv, run_dir, cwd=tmp_path / "here")).ended()
    assert run.code == 0, run.launched.stderr
    assert run.launched.summary["attempts"] == 2
    said = (run_dir / "logs" / "launcher.log").read_text()
    assert "rank 1 on host n2" in said and "ValueError: a sample of 3 tokens" in said
    assert run.launched.losses == pytest.approx(undisturbed)
    run.require_nothing_left(5)


@pytest.mark.cluster("slurm")
def test_a_submitted_program_goes_on_after_its_time_limit(
    slurm: SlurmCluster, undisturbed: list[float], tmp_path: Path
) -> None:
    """SIGUSR1 to the batch shell is what Slurm sends before the time limit."""
    here, path = tmp_path / "here", tmp_path / "a run"
    trainer(here)
    there = ("--on", "slurm", "--set", f"launch.program_dir={here}")
    argv = command(path, "python train.py 1500 0", *ALONE, *there)
    run = submitted(slurm, [*MPCTL, *argv], path).at_step(3)
    assert slurm.run(["scancel", "--signal=USR1", "--batch", run.job]).returncode == 0
    run.finished()
    assert f"job {run.job} is requeued" in run.output()
    assert run.losses == pytest.approx(undisturbed)
    assert run.recorded_hosts() == {0: "n1", 1: "n2"}
    run.require_nothing_left()
