"""Steps of a real srun that join one launch: a task a node, a task a rank, tasks dealt in turn."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multinode.slurm import SlurmCluster
from tests.multinode.slurm_launch import TP_DP, launch_arguments
from tests.train.runtime.tiny import column, make_data, tiny_job, train

pytestmark = pytest.mark.cluster("slurm")


@pytest.fixture(autouse=True)
def nothing_is_left_running(slurm: SlurmCluster) -> Iterator[None]:
    yield
    slurm.cancel_all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("steps-data"))


@pytest.fixture(scope="module")
def one_process(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return column(train(tiny_job(data), tmp_path_factory.mktemp("one")))


def step(slurm: SlurmCluster, data: Path, run: Path, *srun: str) -> subprocess.CompletedProcess[str]:
    """A step of two nodes whose tasks launch a job of two nodes with two ranks each; which backend
    that is follows from their environment."""
    command = launch_arguments(data, run, *TP_DP)
    at = command.index("--on")
    del command[at : at + 2]
    return slurm.run(
        ["srun", "-N2", "--overcommit", "--kill-on-bad-exit=1", *srun, *command],
        seconds=200,
        env={"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("tasks", [1, 2], ids=["a task a node", "a task a rank"])
def test_the_tasks_of_a_step_train_one_run(
    slurm: SlurmCluster, data: Path, one_process: list[float], tmp_path: Path, tasks: int
) -> None:
    done = step(slurm, data, tmp_path / "run", f"--ntasks-per-node={tasks}")
    assert done.returncode == 0, done.stderr
    records = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in records]
    assert losses == pytest.approx(one_process, rel=1e-5)
    hosts = json.loads((tmp_path / "run/nodes/hosts.json").read_text())["hosts"]
    assert [entry["ranks"] for entry in hosts] == [{"first": n, "count": 2} for n in (0, 2)]
    assert done.stdout.count("finished after 20 steps") == 1


def test_tasks_that_are_dealt_to_the_nodes_in_turn_are_refused(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    done = step(slurm, data, tmp_path / "run", "--ntasks-per-node=2", "--distribution=cyclic")
    assert done.returncode == 2
    assert "--distribution=block" in done.stderr and not (tmp_path / "run/job.json").exists()
