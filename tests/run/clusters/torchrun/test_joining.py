"""`mpctl launch` in the processes of worlds that others started, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.clusters.torchrun.processes import Capture, Environment, World, pod, said_by, torchrun_world
from tests.run.launch.command import Launched, arguments, wait_for

ENDLESS = ("--set", "training.steps=100000", "--set", "training.eval_samples=0")
SHORT = ("--set", "training.steps=3", "--set", "training.eval_samples=0")


def ranks(size: int, nodes: int = 1) -> list[Environment]:
    """A process a rank."""
    return [torchrun_world(rank, nodes, size // nodes) for rank in range(size)]


def pods(nodes: int) -> list[Environment]:
    """A process a node, of one rank each."""
    return [{**pod(node, nodes, "1"), "PET_MASTER_ADDR": "localhost"} for node in range(nodes)]


def layout(environments: list[Environment]) -> list[str]:
    """The settings by which the plan has two ranks on as many nodes as the world."""
    nodes = 2 if "PET_NNODES" in environments[0] else 1
    return ["--set", f"cluster.nodes={nodes}", "--set", f"cluster.gpus_per_node={2 // nodes}"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "outputs", tmp_path / "run")
    yield world
    world.kill()


def hosts(world: World) -> list[tuple[int, list[int]]]:
    document = json.loads((world.run_dir / "nodes/hosts.json").read_text())
    return [(host["node"], [*host["ranks"].values()]) for host in document["hosts"]]


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def summary(world: World) -> dict[str, object]:
    return json.loads((world.run_dir / "summary.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_process_a_rank_trains_as_planned(data: Path, finished: Launched, world: World) -> None:
    """The second one starts first and waits; the losses are those of a launch by mpctl."""
    argv = arguments(data, world.run_dir, "--tp", "2", *SHORT)
    assert world.start(argv, ranks(2)).ended() == [0, 0], world.output()
    planned = json.loads((finished.run_dir / "job.json").read_text())["training"]["warmup_steps"]
    assert planned >= 3  # the schedule of so few steps is the same
    assert losses(world.run_dir) == pytest.approx(finished.losses[:3], rel=1e-6)
    assert hosts(world) == [(0, [0, 2])]
    assert "finished after 3 steps" in world.output(0) and world.output(1) == ""
    compared = summary(world)["plan_beside_run"]
    assert [rank["agrees"] for rank in compared] == [True, True]  # type: ignore[attr-defined]
    launcher = json.loads((world.run_dir / "launcher.json").read_text())
    assert (launcher["backend"], len(launcher["hosts"])) == ("torchrun", 1)
    assert world.left() == [] and not (world.run_dir / "nodes/meeting.json").exists()


def test_another_world_than_the_planned_one_is_refused(data: Path, tmp_path: Path, capfd: Capture) -> None:
    argv = arguments(data, tmp_path / "run", "--tp", "4")
    code, said = said_by(ranks(2)[0], argv, capfd)
    assert code == 2 and "torchrun started 2 processes, but the plan has 4 ranks" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_it_is_refused_by_one_message(data: Path, world: World) -> None:
    argv = arguments(data, world.run_dir, "--tp", "4")
    world.start(argv, ranks(2))
    assert world.processes[0].wait(60) == 2
    world.processes[1].terminate()  # as torchrun and srun --kill-on-bad-exit do
    # By the signal itself where the process still imports: its handler is set before it waits.
    assert world.processes[1].wait(10) in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert "torchrun started 2 processes, but the plan has 4 ranks" in world.output(0)
    assert world.output(1) == ""
    assert not world.run_dir.exists() and world.left() == []


@pytest.mark.slow
def test_a_process_that_is_numbered_otherwise_is_named_by_the_first(data: Path, world: World) -> None:
    """Two nodes of one rank each by the plan; the second process claims to be on the first."""
    argv = arguments(data, world.run_dir, "--dp", "2", *layout(pods(2)))
    misplaced = {**torchrun_world(1, 2, 1), "GROUP_RANK": "0"}
    world.start(argv, [torchrun_world(0, 2, 1), misplaced])
    assert world.processes[0].wait(60) == 2
    assert "process 1 is number 0 of node 0, where the plan has rank 0" in world.output(0)
    assert world.processes[1].wait(10) == 0 and world.output(1) == ""  # it was told


def test_every_process_has_to_know_the_run_directory(data: Path, tmp_path: Path, capfd: Capture) -> None:
    argv = arguments(data, tmp_path / "run", "--tp", "2")
    at = argv.index("--run-dir")
    first, second = (said_by(here, [*argv[:at], *argv[at + 2 :]], capfd) for here in ranks(2))
    assert first[0] == second[0] == 2
    assert "add --run-dir" in first[1] and second[1] == ""


@pytest.mark.slow
def test_what_would_run_is_shown_by_the_first_alone(data: Path, world: World) -> None:
    argv = arguments(data, world.run_dir, "--tp", "2", "--dry-run")
    assert world.start(argv, ranks(2)).ended(60) == [0, 0]
    assert "RANK=1" in world.output(0) and "mpctl.train.runtime.worker" in world.output(0)
    assert world.output(1) == "" and not world.run_dir.exists()


@pytest.mark.slow
def test_another_backend_may_be_named_inside_of_a_world(data: Path, world: World) -> None:
    argv = arguments(data, world.run_dir, "--tp", "1", "--on", "local", "--dry-run")
    assert world.start(argv, [torchrun_world(1, 1, 2)]).ended(60) == [0]
    assert "mpctl.train.runtime.torchrun" in world.output(0)


@pytest.mark.slow
def test_a_process_a_node_trains_as_planned(data: Path, finished: Launched, world: World) -> None:
    argv = arguments(data, world.run_dir, "--dp", "2", *SHORT, *layout(pods(2)))
    assert world.start(argv, pods(2)).ended() == [0, 0], world.output()
    assert losses(world.run_dir) == pytest.approx(finished.losses[:3], rel=1e-6)
    assert hosts(world) == [(0, [0, 1]), (1, [1, 1])]
    assert world.output(1) == "" and world.left() == []


@pytest.mark.slow
def test_a_finished_run_lets_all_processes_go(data: Path, world: World) -> None:
    argv = arguments(data, world.run_dir, "--tp", "2", *SHORT)
    assert world.start(argv, ranks(2)).ended() == [0, 0]
    again = World(world.folder, world.run_dir).start(["launch", "--resume", "--run-dir", str(world.run_dir)], ranks(2))
    assert again.ended(60) == [0, 0]
    assert "already at step 3" in again.output(0)


@pytest.mark.slow
def test_torchrun_itself(data: Path, finished: Launched, world: World) -> None:
    argv = arguments(data, world.run_dir, "--tp", "2", *SHORT)
    assert torchrun(argv, world).returncode == 0
    assert losses(world.run_dir) == pytest.approx(finished.losses[:3], rel=1e-6)
    refused = torchrun(arguments(data, world.run_dir, "--tp", "4"), world)
    assert refused.returncode == 1  # torchrun's own; that of the first process is 2
    assert refused.stderr.count("but the plan has 4 ranks  [world") == 1
    assert "exitcode  : 2" in refused.stderr


def torchrun(argv: list[str], world: World) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
        "-m",
        "mpctl",
        *argv,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("environments", [ranks(2), pods(2)], ids=["ranks", "nodes"])
def test_a_killed_rank_is_started_again(data: Path, world: World, environments: list[Environment]) -> None:
    """By mpctl: the processes of the world go on, so that who started them sees nothing."""
    restart = ("--set", "launch.max_restarts=1", "--set", "checkpoint.interval=5")
    argv = arguments(data, world.run_dir, "--dp", "2", *layout(environments), *restart)
    world.start(argv, environments).at_step(7)
    wait_for(lambda: 1 in world.workers())
    world.workers()[1].kill()
    assert world.ended() == [0, 0], world.output()
    assert summary(world)["attempts"] == 2
    assert "rank 1" in world.output(0) and world.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("environments", [ranks(2), pods(2)], ids=["ranks", "nodes"])
def test_a_signal_to_all_processes_saves(data: Path, world: World, environments: list[Environment]) -> None:
    """As Kubernetes ends pods and torchrun its children: all at once, then a kill after a while."""
    argv = arguments(data, world.run_dir, "--dp", "2", *layout(environments), *ENDLESS)
    world.start(argv, environments).at_step(2)
    for process in world.processes:
        os.killpg(process.pid, signal.SIGTERM)
    assert world.ended(60) == [128 + signal.SIGTERM] * 2, world.output()
    saved = summary(world)
    assert saved["status"] == "stopped" and saved["checkpoint"] == saved["steps"]
    assert world.left() == []


@pytest.mark.slow
def test_a_signal_to_one_process_stops_the_run(data: Path, world: World) -> None:
    """One pod is evicted: all ranks save, since they cannot go on without it, and no process
    succeeds: one that did would not be started again with the others."""
    argv = arguments(data, world.run_dir, "--dp", "2", *ENDLESS)
    world.start(argv, ranks(2)).at_step(2)
    world.processes[1].terminate()
    assert world.ended(60) == [128 + signal.SIGTERM] * 2
    assert summary(world)["status"] == "stopped" and world.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_leaves_no_rank_behind(data: Path, world: World, victim: int) -> None:
    argv = arguments(data, world.run_dir, "--dp", "2", *ENDLESS)
    world.start(argv, ranks(2)).at_step(2)
    world.processes[victim].kill()
    start = time.monotonic()
    wait_for(lambda: not world.workers(), 30)
    assert time.monotonic() - start < 15
    other = world.processes[1 - victim]
    if victim == 0:
        other.terminate()  # it waits for the launcher to come back
    assert other.wait(30) == (128 + signal.SIGTERM if victim == 0 else 1)
    assert wait_for(lambda: not world.left(), 30)
