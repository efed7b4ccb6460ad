"""`mpctl bench` in the processes of worlds that others started, with real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.run.clusters.torchrun.processes import Capture, Environment, World, pod, said_by, torchrun_world

MODES = ("bench", "tensor-modes", "--model", "demo-gpt", "--ranks", "2", "--rounds", "1", "--steps", "1")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "outputs", tmp_path / "out")
    yield world
    world.kill()


def ranks(size: int) -> list[Environment]:
    """A process a rank."""
    return [torchrun_world(rank, 1, size) for rank in range(size)]


def pods(nodes: int) -> list[Environment]:
    """A process a node, of one rank each."""
    return [{**pod(node, nodes, "1"), "PET_MASTER_ADDR": "localhost"} for node in range(nodes)]


def report(world: World) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((world.run_dir / "report.json").read_text())
    return document


@pytest.mark.slow
def test_a_process_a_rank_measures_and_the_first_one_reports(world: World) -> None:
    argv = [*MODES, "--device", "cpu", "--out", str(world.run_dir)]
    assert world.start(argv, ranks(2)).ended() == [0, 0], world.output() + world.output(1)
    assert [row["mode"] for row in report(world)["results"]] == ["1d"]
    assert "One layer" in world.output(0) and world.output(1) == ""
    launcher = json.loads((world.run_dir / "ranks-r1/launcher.json").read_text())
    assert launcher["backend"] == "torchrun"
    assert world.left() == []


@pytest.mark.slow
def test_a_process_a_node_measures_collectives(world: World) -> None:
    argv = [
        "bench",
        "collectives",
        "--tp",
        "2",
        "--nodes",
        "2",
        "--gpus-per-node",
        "1",
        "--allow-tp-across-nodes",
        "-e",
        "4K",
        "--rounds",
        "1",
        "--kinds",
        "all_reduce",
        "--device",
        "cpu",
        "--out",
        str(world.run_dir),
    ]
    assert world.start(argv, pods(2)).ended() == [0, 0], world.output() + world.output(1)
    assert {row["wrong"] for row in report(world)["results"]} == {0}
    assert world.left() == []


def test_a_folder_has_to_be_named(tmp_path: Path, capfd: Capture) -> None:
    first, second = (said_by(here, [*MODES, "--device", "cpu"], capfd) for here in ranks(2))
    assert first[0] == second[0] == 2
    assert "--out" in first[1] and second[1] == ""


@pytest.mark.parametrize("command", ["scaling", "verify"])
def test_a_bench_of_several_sizes_is_refused_by_one_message(tmp_path: Path, capfd: Capture, command: str) -> None:
    argv = ["bench", command, "demo", "--out", str(tmp_path / "out")]
    first, second = (said_by(here, argv, capfd) for here in ranks(2))
    assert first[0] == second[0] == 2
    assert "already has one" in first[1] and second[1] == ""
    assert not (tmp_path / "out").exists()


def test_a_job_that_runs_on_this_host_alone_joins_no_world(tmp_path: Path, capfd: Capture) -> None:
    """What it is refused for is its own: it has no model, and one world size is no comparison."""
    job = tmp_path / "job.toml"
    job.write_text('[launch]\non = "local"\n')
    argv = ["bench", "scaling", str(job), "--world", "1", "--out", str(tmp_path / "out")]
    (here,) = ranks(1)
    code, said = said_by(here, argv, capfd)
    assert code == 2 and "already has one" not in said


def test_outside_of_a_world_it_is_refused(tmp_path: Path, capfd: Capture) -> None:
    argv = [*MODES, "--device", "cpu", "--on", "torchrun", "--out", str(tmp_path / "out")]
    code, said = said_by({}, argv, capfd)
    assert code == 2 and "torchrun was asked for" in said
    assert not (tmp_path / "out").exists()
