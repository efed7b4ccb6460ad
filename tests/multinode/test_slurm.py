"""Launches through a real Slurm of two nodes on this machine: the layout as planned, nothing left
behind, and a run that goes on after preemption and lost nodes."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpctl.run.clusters.slurm.allocation import expand_node_list
from tests.multinode.daemons import wait_until
from tests.multinode.slurm import NODES, SlurmCluster
from tests.multinode.slurm_launch import LONG, TP_DP, TP_PP, SlurmRun, allocated, launch_arguments, submitted
from tests.train.runtime.tiny import column, make_data, tiny_job, train

pytestmark = pytest.mark.cluster("slurm")
AGENT = "mpctl.run.launch.node.agent"


@pytest.fixture(autouse=True)
def nothing_is_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    cluster: SlurmCluster = request.getfixturevalue("slurm")
    cluster.cancel_all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("slurm-data"))


@pytest.fixture(scope="module")
def one_process(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return column(train(tiny_job(data), tmp_path_factory.mktemp("one")))


# ---------------------------------------------------------------- the cluster of these tests


def test_a_step_runs_on_both_nodes(slurm: SlurmCluster) -> None:
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", "printenv", "SLURMD_NODENAME"])
    assert (done.returncode, sorted(done.stdout.split())) == (0, [*NODES]), done.stderr


@pytest.mark.parametrize("text", ["gpu[003-005,7],login1", "rack[0-1]n[08-11]", "n2,n1", "a"])
def test_node_lists_are_expanded_as_scontrol_does(slurm: SlurmCluster, text: str) -> None:
    listed = slurm.run(["scontrol", "show", "hostnames", text]).stdout.split()
    assert expand_node_list(text) == listed


# ---------------------------------------------------------------- training


def test_ranks_are_where_the_plan_has_them_in_whatever_order_the_nodes_are_listed(
    slurm: SlurmCluster, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    """tp inside of a node, dp across. srun numbers n1 0 and n2 1, also for a list in the other
    order; the node rank is the index in the list."""
    path = tmp_path / "run"
    command = launch_arguments(data, path, *TP_DP)
    run = allocated(slurm, command, path, SLURM_JOB_NODELIST="n2,n1").at_step(1)
    expected = {0: "n2", 1: "n2", 2: "n1", 3: "n1"}
    assert run.hosts_of_ranks() == expected
    assert run.ended() == 0, run.output()
    assert run.recorded_hosts() == expected
    assert run.losses == pytest.approx(one_process, rel=1e-5)
    assert all(rank["agrees"] for rank in run.summary["plan_beside_run"])
    run.require_nothing_left(5)


def test_a_submitted_run_is_preempted_requeued_and_ends_as_if_undisturbed(
    slurm: SlurmCluster, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    """tp inside of a node, pp across. SIGUSR1 to the batch shell is what Slurm sends before the
    time limit. Variables of the shell would send the job to a partition of a minute, and keep it
    from being requeued."""
    path = tmp_path / "a run"
    shell = ["env", "SBATCH_PARTITION=short", "SBATCH_NO_REQUEUE=1"]
    command = launch_arguments(data, path, *TP_PP, launch__slurm__partition="main")
    run = submitted(slurm, [*shell, *command], path).at_step(3)
    assert slurm.run(["squeue", "-ho", "%P", "-j", run.job]).stdout.strip() == "main"
    assert slurm.run(["scancel", "--signal=USR1", "--batch", run.job]).returncode == 0
    run.finished()
    output = run.output()
    assert f"job {run.job} is requeued" in output
    assert "restart 1, from step-" in output
    assert run.losses == pytest.approx(one_process, rel=1e-5)
    assert run.recorded_hosts() == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    assert json.loads((path / "launcher.json").read_text())["job_id"] == run.job
    run.require_nothing_left()


def test_a_submitted_run_is_watched_read_and_stopped_by_its_directory(
    slurm: SlurmCluster, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    run = submitted(slurm, launch_arguments(data, path, *TP_DP, *LONG), path).at_step(1)
    status = slurm.mpctl("status", str(path))
    assert status.returncode == 0, status.stderr
    assert "slurm" in status.stdout and run.job in status.stdout
    assert "rank" in slurm.mpctl("logs", str(path)).stdout
    stop = slurm.mpctl("stop", str(path))
    assert stop.returncode == 0, stop.stdout + stop.stderr
    assert [*(path / "checkpoints").glob("step-*")], "it saved where it stopped"
    run.require_nothing_left()
    assert slurm.wait_for(run.job, {"FAILED", "COMPLETED"}, 30) == "COMPLETED", run.output()


def test_a_run_that_waits_in_the_queue_is_shown_and_taken_back(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    command = launch_arguments(data, path, *TP_DP, launch__slurm__extra=["--hold"])
    run = submitted(slurm, command, path)
    assert "PENDING (JobHeldUser)" in slurm.mpctl("status", str(path)).stdout
    slurm.mpctl("stop", str(path))
    slurm.wait_for(run.job, {"CANCELLED"}, 10)


def test_a_job_that_is_refused_before_training_has_failed_and_says_why(
    slurm: SlurmCluster, data: Path, tmp_path: Path
) -> None:
    """Its data are removed while it waits."""
    own, path = tmp_path / "data", tmp_path / "run"
    shutil.copytree(data, own)
    command = launch_arguments(own, path, *TP_DP, launch__slurm__extra=["--hold"])
    run = submitted(slurm, command, path)
    shutil.rmtree(own)
    assert slurm.run(["scontrol", "release", run.job]).returncode == 0
    slurm.wait_for(run.job, {"FAILED"}, 60)
    for words in ("status", "runs", "stop"):
        said = slurm.mpctl(words, str(path)).stdout
        assert "failed" in said and "refused before training" in said and str(own) in said


# ---------------------------------------------------------------- arrays


def test_the_runs_of_an_array_are_requeued_shown_and_stopped_one_by_one(
    slurm: SlurmCluster, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    """One at a time: the second is taken back while it waits, the first is preempted and goes on,
    the third has another seed."""
    folder = tmp_path / "a sweep"
    array = ["--set", "launch.slurm.array=[{seed = 1234}, {seed = 2}, {seed = 3}]"]
    command = launch_arguments(data, folder, *TP_DP, *array, *LONG, launch__slurm__array_limit=1)
    done = slurm.run([*command, "--submit", "--json"])
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    job = document["job_id"]
    first, second, third = (
        SlurmRun(slurm, Path(path), job=f"{job}_{number}") for number, path in enumerate(document["runs"])
    )
    waiting = slurm.mpctl("status", str(second.path))
    assert f"{job}_1: PENDING" in waiting.stdout, waiting.stdout + waiting.stderr
    assert "cancelled" in slurm.mpctl("stop", str(second.path)).stdout
    first.at_step(3)
    assert f"job {job}_0" in slurm.mpctl("status", str(first.path)).stdout
    script = str(first.path / "slurm.sh")  # scancel --batch of Slurm 22.05 fails for a task
    (shell,) = [p for p in first.processes() if p.cmdline() == ["/bin/bash", script]]
    shell.send_signal(signal.SIGUSR1)
    wait_until(lambda: "is requeued" in first.output(), 60, first.output)
    assert slurm.mpctl("stop", str(third.at_step(1).path)).returncode == 0  # it went first
    first.at_step(len(first.records) + 1)
    assert "restart 1, from step-" in first.output()
    assert slurm.mpctl("stop", str(first.path)).returncode == 0
    assert first.losses[0] == pytest.approx(one_process[0], rel=1e-5)
    assert third.losses[0] != pytest.approx(one_process[0], rel=1e-5)
    assert not second.records
    rows = json.loads(slurm.mpctl("runs", str(folder), "--json").stdout)["runs"]
    assert sorted(row["name"] for row in rows) == ["task-0", "task-1", "task-2"]


# ---------------------------------------------------------------- faults


def test_a_lost_node_is_named_and_the_run_goes_on(
    slurm: SlurmCluster, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    command = launch_arguments(data, path, *TP_DP, launch__max_restarts=1, checkpoint__interval=2)
    run = allocated(slurm, command, path).at_step(4)
    for process in run.find(AGENT, "n2"):
        process.kill()
    assert run.ended() == 0, run.output()
    assert "n2" in run.output()
    assert run.losses == pytest.approx(one_process, rel=1e-5)
    assert run.summary["attempts"] == 2
    run.require_nothing_left()


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_job_whose_node_dies_is_requeued_and_goes_on(
    slurm: SlurmCluster, data: Path, one_process: list[float], tmp_path: Path, max_restarts: int
) -> None:
    """slurmd and all processes of n2 are killed; it comes back before Slurm would notice, and after
    the launcher has given up connecting to it again."""
    path = tmp_path / "run"
    settings = {"launch__max_restarts": max_restarts, "launch__start_seconds": 20}
    command = launch_arguments(data, path, *TP_DP, checkpoint__interval=2, **settings)
    run = submitted(slurm, command, path).at_step(4)
    slurm.nodes["n2"].end(signal.SIGKILL)
    for process in slurm.processes("n2"):
        process.kill()
    wait_until(lambda: "n2 was lost" in run.output(), 60, run.output)
    slurm.start_node("n2")
    run.finished()
    assert "restart 1, from step-" in run.output()
    assert run.losses == pytest.approx(one_process, rel=1e-5)
    run.require_nothing_left()


def test_a_job_whose_launcher_is_killed_is_requeued_and_goes_on(
    slurm: SlurmCluster, data: Path, one_process: list[float], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    command = launch_arguments(data, path, *TP_DP, checkpoint__interval=2)
    run = submitted(slurm, command, path).at_step(4)
    for process in run.find("mpctl"):
        process.kill()
    wait_until(lambda: "is requeued" in run.output(), 60, run.output)
    assert "its launcher was killed by signal 9" in run.output()
    run.finished()
    assert run.losses == pytest.approx(one_process, rel=1e-5)
    run.require_nothing_left()


def test_a_rank_that_is_killed_is_named_with_its_node(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = allocated(slurm, launch_arguments(data, path, *TP_PP, *LONG), path).at_step(1)
    run.ranks()[3].kill()
    assert run.ended() == 1, run.output()
    assert "rank 3" in run.output() and "n2" in run.output()
    assert "killed by signal 9" in run.output()
    run.require_nothing_left()


def test_cancelling_the_job_leaves_no_process(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = submitted(slurm, launch_arguments(data, path, *TP_DP, *LONG), path).at_step(1)
    assert slurm.run(["scancel", run.job]).returncode == 0
    run.require_nothing_left(30)
    slurm.wait_for(run.job, {"CANCELLED"}, 20)


def test_a_launcher_that_is_killed_leaves_no_process(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = allocated(slurm, launch_arguments(data, path, *TP_DP, *LONG), path).at_step(1)
    for process in run.find("mpctl"):
        process.send_signal(signal.SIGKILL)
    run.require_nothing_left()
    assert run.ended() != 0


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cluster__nodes": 5, "training__global_batch_size": 20}, "partition 'main' has 2 such"),
        ({"launch__slurm__partition": "gpus"}, "it has main, short, one, closed"),
        ({"launch__slurm__partition": "closed"}, "partition 'closed' is not up"),
        ({"launch__slurm__partition": "one"}, "partition 'one' has 1 such"),
        ({"launch__slurm__partition": "short", "launch__slurm__time": "10"}, "allows 0:01:00"),
        ({"cluster__gpus_per_node": 4}, "has 0 such; it has 2 nodes with 2 GPUs, 2 CPUs"),
        ({"launch__slurm__extra": ["-N9"]}, "'-N9' follows from cluster.nodes"),
    ],
)
def test_what_slurm_would_let_wait_for_ever_is_refused(
    slurm: SlurmCluster, data: Path, tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    path = tmp_path / "run"
    before = slurm.jobs()
    done = slurm.run([*launch_arguments(data, path, "--tp", "2", **settings), "--submit"])
    assert done.returncode == 2, done.stderr
    assert words in " ".join(done.stderr.split())
    assert slurm.jobs().keys() <= before.keys()  # Slurm forgets old jobs meanwhile
    assert not path.exists()


def test_outside_of_an_allocation_the_ways_in_are_named(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    done = slurm.run(launch_arguments(data, tmp_path / "run", *TP_DP))
    assert done.returncode == 2
    assert "--submit" in done.stderr and "salloc -N 2" in done.stderr


def test_an_allocation_that_is_too_small_is_refused(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    settings = {"cluster__nodes": 3, "training__global_batch_size": 12}
    command = launch_arguments(data, tmp_path / "run", "--tp", "2", **settings)
    done = slurm.run(["salloc", "-Q", "-N2", *command])
    assert done.returncode == 2
    assert "the plan has 3 nodes, but job" in " ".join(done.stderr.split())


def test_a_dry_run_shows_the_script_and_submits_nothing(slurm: SlurmCluster, data: Path, tmp_path: Path) -> None:
    path, before = tmp_path / "run", slurm.jobs()
    done = slurm.run([*launch_arguments(data, path, *TP_DP), "--submit", "--dry-run"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=tiny\n#SBATCH --nodes=2\n")
    assert slurm.jobs().keys() <= before.keys() and not path.exists()
    assert SlurmRun(slurm, path).processes() == []
    wait_until(lambda: slurm.states() == dict.fromkeys(NODES, "idle"), 10, str)
