"""`mpctl tune --on slurm` on a real Slurm of two nodes: trials as jobs, a kill, Ctrl-C, and a whole
tuning in one allocation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpctl.measure.tune.state import TrialRecord, TuneFolder
from tests.multinode.daemons import wait_until
from tests.multinode.slurm import SlurmCluster
from tests.started import started
from tests.train.runtime.tiny import SETTINGS, make_data

pytestmark = pytest.mark.cluster("slurm")


@pytest.fixture(autouse=True)
def nothing_is_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    cluster: SlurmCluster = request.getfixturevalue("slurm")
    cluster.cancel_all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("tune-data"))


def tune(data: Path, out: Path, *more: str) -> list[str]:
    """A tuning of layouts of dp and pp on two nodes with two ranks each, two trials."""
    given = {
        "cluster": "this-machine",
        **SETTINGS,
        "data.path": str(data),
        "training.eval_samples": 0,
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 2,
        "cluster.inter_node.bandwidth": 1e9,
        "cluster.inter_node.latency": 1e-5,
        "parallel.tp": 1,
        "parallel.cp": 1,
        "parallel.zero": 0,
    }
    del given["cluster.device"]
    sets = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    words = [part for one in sets for part in ("--set", one)]
    return [
        sys.executable,
        "-m",
        "mpctl",
        "tune",
        *words,
        "--on",
        "slurm",
        "--budget",
        "10m",
        "--trials",
        "2",
        "--out",
        str(out),
        *more,
    ]


def records(out: Path) -> list[TrialRecord]:
    return TuneFolder(out).records()


def test_a_job_that_outlives_its_tuning_is_waited_for(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    """The first tuning is killed while its job runs; the second makes one more trial."""
    out, before = tmp_path / "t", set(slurm.jobs())
    with started(tune(data, out), env=slurm.env, stdin=subprocess.DEVNULL) as first:
        wait_until(lambda: out.exists() and records(out) and records(out)[0].job, 60, "submitted")
        first.kill()
    again = slurm.run(tune(data, out), seconds=300)
    assert again.returncode == 0, again.stderr
    made = records(out)
    assert [one.status for one in made] == ["measured"] * 2, made
    assert len(set(slurm.jobs()) - before) == 2 and all(one.wall > 0 for one in made)
    assert "2 trials" in again.stdout and "in the queue" in again.stdout


def test_ctrl_c_cancels_the_job(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "t"
    with started(tune(data, out), env=slurm.env, stderr=subprocess.PIPE) as tuning:
        wait_until(lambda: out.exists() and records(out) and records(out)[0].job, 60, "submitted")
        tuning.send_signal(signal.SIGINT)
        _, said = tuning.communicate(timeout=60)
    (record,) = records(out)
    assert tuning.returncode == 130 and f"job {record.job} is cancelled" in said.decode()
    slurm.wait_for(record.job, {"CANCELLED", "GONE"}, 30)


def test_a_whole_tuning_runs_in_one_allocation(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "t"
    said = slurm.run(tune(data, out, "--submit", "--json"))
    assert said.returncode == 0, said.stderr
    job = json.loads(said.stdout)["job_id"]
    state = slurm.wait_for(job, {"COMPLETED", "FAILED", "TIMEOUT"}, 300)
    assert state == "COMPLETED", (out / f"logs/slurm-{job}.out").read_text()
    assert [(one.status, one.job) for one in records(out)] == [("measured", "")] * 2
    assert "2 trials" in slurm.mpctl("tune", "--show", str(out)).stdout
