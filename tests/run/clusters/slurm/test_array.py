"""Arrays: several runs of a job by one submission. tests/multinode/test_slurm.py runs one."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from mpctl.cli.app import run as mpctl
from mpctl.run.clusters.backend import job_here
from mpctl.run.clusters.slurm.array import array_issues, render_array, task_folder, task_settings
from mpctl.run.clusters.slurm.script import BatchJob
from mpctl.spec.launch import SlurmSpec
from tests.run.history.made import SETTINGS

FOLDER = Path("/data/a 100% 'sweep'")


def batch_jobs(count: int, **settings: object) -> list[BatchJob]:
    slurm = SlurmSpec.model_validate(settings)
    one = BatchJob("task-0", FOLDER, 2, 4, 8, ["python"], 120, slurm)
    runs = [task_folder(FOLDER, number) for number in range(count)]
    return [replace(one, run=run, name=run.name, signal_seconds=120 + number) for number, run in enumerate(runs)]


def options(script: str) -> list[str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    return [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]


def test_the_script_has_the_options_of_its_runs_and_runs_that_of_its_task() -> None:
    jobs = batch_jobs(3, partition="a100", array_limit=2)
    script = render_array(jobs, FOLDER, ["task-0: {}"])
    found = options(script)
    assert found[:2] == ["--job-name=a 100% 'sweep'", "--array=0-2%2"]
    assert {"--nodes=2", "--gpus-per-node=4", "--partition=a100", "--requeue"} < {*found}
    assert "--signal=B:USR1@122" in found, "the longest time to save of any task"
    assert found[-1] == "--output=/data/a 100%% 'sweep'/task-%a/logs/slurm-%A_%a.out"
    assert sum(option.startswith("--output") for option in found) == 1
    command = shlex.split(script.splitlines()[-1])
    assert command == ["exec", "/bin/bash", f"{FOLDER}/task-$SLURM_ARRAY_TASK_ID/slurm.sh"]
    assert "%" not in options(render_array(batch_jobs(2), FOLDER, []))[1]
    named = [replace(job, name="mine") for job in jobs]
    assert options(render_array(named, FOLDER, []))[0] == "--job-name=mine"


def test_what_the_tasks_share_is_not_set_by_one() -> None:
    array = [{"seed": 1}, {"nodes": 2, "training.steps": 5}, {"launch.slurm.time": "1"}]
    issues = list(array_issues(SlurmSpec(array=array)))
    assert [issue.message for issue in issues] == [
        "task 1 sets cluster.nodes, which all tasks share",
        "task 2 sets launch.slurm.time, which all tasks share",
    ]
    assert task_settings({"seed": 1}) == {"training.seed": 1, "launch.slurm.array": []}


def test_a_task_knows_its_job() -> None:
    task = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    assert job_here("slurm", task) == "5_2"
    assert job_here("slurm", {"SLURM_JOB_ID": "7"}) == "7"
    assert job_here("kubernetes", {**task, "MPCTL_JOB": "a"}) == "a"
    assert job_here("slurm", {}) is job_here("local", task) is None


def test_a_dry_run_with_json_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [f"{key}={value!r}".replace("'", '"') for key, value in SETTINGS.items()]
    words = [word for one in sets for word in ("--set", one)]
    more = ["--device", "cpu", "--set", 'data.corpus=["python-stdlib"]']
    run = ["--on", "slurm", "--submit", "--dry-run", "--json", "--run-dir", str(tmp_path / "a")]
    for array in ([], ["--set", "launch.slurm.array=[{seed = 1}, {seed = 2}]"]):
        assert mpctl(["launch", *words, *more, *array, *run]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["document"].startswith("#!/bin/bash\n#SBATCH ")
        assert shown["job_id"] is None and shown["run_dir"] == str(tmp_path / "a")
        assert ("--array=0-1" in shown["document"]) == bool(array)


def test_everything_that_is_wrong_with_any_run_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [f"{key}={value!r}".replace("'", '"') for key, value in SETTINGS.items()]
    sets.append("launch.slurm.array=[{tp = 3}, {seed = 2}, {heads = 3, bla = 1}]")
    words = [word for one in sets for word in ("--set", one)]
    run = ["--on", "slurm", "--submit", "--dry-run", "--run-dir", str(tmp_path / "sweep")]
    assert mpctl(["launch", *words, *run]) == 2
    said = capsys.readouterr().err
    assert "(task 0)" in said and "bla: there is no such setting (task 2)" in said
    assert "task 1" not in said
    assert not (tmp_path / "sweep").exists()
