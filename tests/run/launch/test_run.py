"""A run that ends well: files, account, the curve of one process, and its resumption."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mpctl.cli.app import run as mpctl
from mpctl.records.rundir.directory import RunDir
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.launch_plan import HostCommand, plan_launch
from mpctl.run.launch.summary import summarise
from mpctl.run.launch.supervise import RunOutcome
from tests.run.launch.command import Launched, arguments, launch, start
from tests.train.runtime.tiny import column, tiny_job, tiny_plan, train


@pytest.fixture(scope="module")
def one_process(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return column(train(tiny_job(data), tmp_path_factory.mktemp("one")))


def test_it_finishes_with_the_curve_of_one_process(finished: Launched, one_process: list[float]) -> None:
    assert finished.process.returncode == 0, finished.stderr
    assert finished.losses == pytest.approx(one_process, rel=1e-5)
    assert [record["step"] for record in finished.records] == list(range(1, 21))


def test_its_files_logs_and_summary(finished: Launched) -> None:
    run = finished.run_dir
    assert sorted(path.name for path in run.iterdir()) == [
        ".mpctl-run",
        "checkpoints",
        "job.json",
        "launcher.json",
        "logs",
        "metrics.jsonl",
        "nodes",
        "plan.json",
        "ranks",
        "summary.json",
    ]
    summary = finished.summary
    assert summary["schema"] == "mpctl.run/2"
    assert (summary["status"], summary["steps"], summary["attempts"]) == ("finished", 20, 1)
    assert summary["final_loss"] == finished.losses[-1]
    assert summary["tokens"] == 20 * 8 * 32 and summary["checkpoint"] == 20
    assert summary["failure"] is None and summary["validation_loss"] > 0
    assert json.loads((run / "plan.json").read_text())["schema"] == "mpctl.plan/2"
    assert len(finished.records[0]["memory_bytes"]) == 2
    # Only JSON is on stdout.
    assert json.loads(finished.stdout) == finished.summary
    assert "step 20/20" in finished.stderr
    for rank in (0, 1):
        text = (finished.run_dir / f"logs/rank-{rank}.log").read_text()
        assert text.startswith(f"rank {rank} of 2, coordinates {{'tp': {rank}, 'cp': 0, 'dp': 0")
        assert "step 20: loss" in text
    # What ran is what was planned.
    compared = finished.summary["plan_beside_run"]
    assert [rank["rank"] for rank in compared] == [0, 1]
    assert all(rank["agrees"] for rank in compared)
    assert all(rank[f"{of}_traffic"]["measured"] for rank in compared for of in ("step", "validation"))


def test_a_run_that_differs_from_its_plan_is_noticed(data: Path, finished: Launched, tmp_path: Path) -> None:
    plan = tiny_plan(tiny_job(data, 2))
    prepared = plan_launch(plan, RunDir(tmp_path), Machine(2, 0, 2**40))
    shutil.copytree(finished.run_dir / "ranks", tmp_path / "ranks")
    path = tmp_path / "ranks/rank-1.json"
    measured = path.read_text()
    for key in (
        ("parameters",),
        ("step_traffic", "tp all_reduce", "count"),
        ("step_traffic", "world all_reduce", "bytes"),
        ("validation", "traffic", "tp all_reduce", "bytes"),
    ):
        report = entry = json.loads(measured)
        for part in key[:-1]:
            entry = entry[part]
        entry[key[-1]] += 1
        path.write_text(json.dumps(report))
        summary = summarise(plan, prepared, RunOutcome("finished", 1), command="")
        assert [rank["agrees"] for rank in summary["plan_beside_run"]] == [True, False], key


def test_dry_run_writes_nothing_and_shows_what_runs(
    data: Path, finished: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its command is the one that ran, but for the port; its job is the one that the ranks read."""
    again = arguments(data, tmp_path / "dry", "--tp", "2")
    assert mpctl([*again, "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "dry").exists()
    log = (finished.run_dir / "logs/torchrun.log").read_text()
    (ran,) = [shlex.split(line[2:]) for line in log.splitlines() if line.startswith("$ ")]

    def plain(command: list[str]) -> list[str]:
        return [part for part in command if not part.startswith("--rdzv-endpoint=")]

    assert plain(document["command"][:-1]) == plain(ran[:-1])
    assert (document["command"][-1], ran[-1]) == (str(tmp_path / "dry"), str(finished.run_dir))
    assert document["job"] == json.loads((finished.run_dir / "job.json").read_text())
    assert mpctl([*again, "--dry-run"]) == 0
    assert "OMP_NUM_THREADS=1" in capsys.readouterr().out


def test_the_commandline_of_the_torchrun_is_the_planned_one(data: Path, finished: Launched) -> None:
    plan = tiny_plan(tiny_job(data, 2))
    prepared = plan_launch(plan, RunDir(finished.run_dir), Machine(2, 0, 2**40))
    command = HostCommand(0, "here", tuple(prepared.command(12345)), prepared.local_env)
    assert shlex.join(prepared.command(12345)) in command.text
    assert "'" in command.text  # the directory has spaces


def _half(finished: Launched, run_dir: Path) -> Path:
    """The finished run as if it had ended after its first checkpoint."""
    shutil.copytree(finished.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-20")
    return run_dir


@pytest.mark.slow
def test_resume_on_another_layout_continues_the_curve(
    finished: Launched, one_process: list[float], tmp_path: Path
) -> None:
    """A relative directory, only --resume and the new sizes; all else is from the run."""
    run_dir = _half(finished, tmp_path / "half")
    argv = ["launch", "--resume", "--run-dir", "half", "--tp", "1"]
    resumed = start(argv, run_dir, cwd=tmp_path).ended()
    assert resumed.process.returncode == 0, resumed.stderr
    assert [record["step"] for record in resumed.records] == list(range(1, 21))
    assert resumed.losses == pytest.approx(one_process, rel=1e-5)
    assert resumed.losses[10:] != finished.losses[10:]  # it was really trained again
    assert "step 11" not in resumed.stdout and "finished after 20 steps" in resumed.stdout


@pytest.mark.slow
def test_overwrite_replaces_a_run(data: Path, finished: Launched, tmp_path: Path) -> None:
    run_dir = tmp_path / "old"
    shutil.copytree(finished.run_dir, run_dir)
    (run_dir / "notes.txt").write_text("mine")
    again = launch(data, run_dir, "--overwrite", "--set", "training.steps=2").ended()
    assert again.process.returncode == 0, again.stderr
    assert [record["step"] for record in again.records] == [1, 2]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-2"]
    assert (run_dir / "notes.txt").read_text() == "mine"
    assert replace(again, run_dir=run_dir).summary["world_size"] == 1
