"""--on slurm without a Slurm: what is checked, and the srun step with a stand-in for srun. Launches
through a real one: tests/multinode/test_slurm.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import make_plan
from mpctl.records.rundir.directory import RunDir
from mpctl.run.clusters.registry import chosen_name, find_backend, find_submitter
from mpctl.run.clusters.slurm.allocation import Allocation, agents_step
from mpctl.run.clusters.slurm.backend import SlurmBackend, SlurmStep
from mpctl.run.clusters.slurm.containers import container_issues, step_options, wrapped
from mpctl.run.clusters.slurm.submission import SlurmSubmitter
from tests.jobs import job_of
from tests.multinode.daemons import wait_until

JOB = job_of({"cluster.nodes": 2, "cluster.gpus_per_node": 4, "launch.on": "slurm"})
INSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_the_backend_is_found_by_name_and_inside_of_an_allocation() -> None:
    assert isinstance(find_backend(JOB, {}), SlurmBackend)
    assert isinstance(find_submitter(JOB, {}), SlurmSubmitter)
    auto = JOB.model_copy(update={"launch": JOB.launch.model_copy(update={"on": "auto"})})
    assert (chosen_name(auto, {}), chosen_name(auto, INSIDE)) == ("local", "slurm")


@pytest.mark.parametrize(
    ("environment", "rule", "way_out"),
    [
        ({}, "no-allocation", "--submit"),
        ({**INSIDE, "SLURM_STEP_NUM_TASKS": "2"}, "slurm-step", "--on torchrun"),
        ({**INSIDE, "SLURM_JOB_NODELIST": "n1"}, "slurm-nodes", "salloc -N 2"),
    ],
)
def test_where_it_cannot_run_the_way_out_is_named(environment: dict[str, str], rule: str, way_out: str) -> None:
    (issue,) = SlurmBackend(JOB, environment).check(make_plan(JOB))
    assert issue.rule == rule
    assert way_out in issue.hint


def test_gpus_are_compared_if_the_job_runs_on_them() -> None:
    job = job_of({"cluster.nodes": 2, "cluster.gpus_per_node": 4, "launch.device": "cuda"})
    inside = SlurmBackend(job, {**INSIDE, "SLURM_GPUS_ON_NODE": "2"})
    assert [issue.rule for issue in inside.check(make_plan(job))] == ["slurm-gpus"]
    assert SlurmBackend(JOB, INSIDE).check(make_plan(JOB)) == []


CONTAINED: dict[str, object] = {
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 4,
    "launch.device": "cuda",
    "launch.slurm.srun": ["--mpi=none", "--switches 1@10"],
    "launch.slurm.container_image": "/images/torch.sqsh",
    "launch.slurm.container_mounts": ["/scratch", "/etc/site:/opt/site"],
    "launch.slurm.container_python": "/opt/python",
    "data.path": "/data/web/text",
}


def test_agents_run_in_a_container_of_pyxis() -> None:
    """srun gets image and mounts; what it starts is the Python of the image."""
    job = job_of({**CONTAINED, "launch.slurm.container": "pyxis"})
    run = Path("/shared/runs/a")
    assert step_options(job, run) == [
        "--mpi=none",
        "--switches",
        "1@10",
        "--container-image=/images/torch.sqsh",
        "--container-mounts=/shared/runs/a:/shared/runs/a,/data/web:/data/web,/scratch:/scratch,/etc/site:/opt/site",
    ]
    assert wrapped(job, run, "/venv/python", ["-m", "agent"]) == ["/opt/python", "-m", "agent"]
    step = agents_step(Allocation("7", ("n1",)), ["n1"], ["agent"], step_options(job, run))
    assert step[1:4] == ["--mpi=none", "--switches", "1@10"] and step[-1] == "agent"


@pytest.mark.parametrize(("device", "driver"), [("cuda", ["--nv"]), ("cpu", [])])
def test_agents_run_in_a_container_of_apptainer(device: str, driver: list[str]) -> None:
    job = job_of({**CONTAINED, "launch.slurm.container": "apptainer", "launch.device": device})
    run = Path("/shared/runs/a")
    assert step_options(job, run) == ["--mpi=none", "--switches", "1@10"]
    assert wrapped(job, run, "/venv/python", ["-m", "agent"]) == [
        "apptainer",
        "exec",
        *driver,
        "--bind",
        "/shared/runs/a,/data/web,/scratch,/etc/site:/opt/site",
        "/images/torch.sqsh",
        "/opt/python",
        "-m",
        "agent",
    ]


def test_a_container_needs_its_image_and_paths() -> None:
    settings = job_of(
        {
            **CONTAINED,
            "launch.slurm.container": "pyxis",
            "launch.slurm.container_image": None,
            "launch.slurm.container_mounts": ["data", "/a:/b:ro", "/a,/b"],
            "launch.slurm.srun": ["--pty"],
        }
    )
    issues = list(container_issues(settings.launch.slurm))
    assert [issue.where.rpartition(".")[2] for issue in issues] == ["srun", "container", *["container_mounts"] * 3]
    (unused,) = container_issues(job_of(CONTAINED).launch.slurm)
    assert "container=pyxis" in unused.hint


def test_without_slurm_a_submission_offers_other_backends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With all else that is wrong; a dry run shows the script, and that it was not compared."""
    monkeypatch.setenv("PATH", str(tmp_path))
    run, submitter = RunDir(tmp_path / "run"), SlurmSubmitter(JOB, {})
    bad = job_of({"launch.slurm.time": "soon"})
    with pytest.raises(InputError) as refused:
        submitter.check(make_plan(bad), run, is_elsewhere=False)
    assert [issue.where for issue in refused.value.issues] == ["--on", "launch.slurm.time"]
    named = make_plan(job_of({"launch.device": "cuda", "cluster.gpus_per_node": 2}))
    assert submitter.shown_anywhere and not submitter.check(named, run, is_elsewhere=True)
    script = submitter.document(named, run).splitlines()
    assert "sinfo is not on this host" in script[-1] and "#SBATCH --gpus-per-node=2" in script
    (issue,) = submitter.check(make_plan(job_of({})), run, is_elsewhere=True)
    assert issue.rule == "device-unknown" and "--device cuda" in issue.hint


def step(folder: Path, script: str) -> SlurmStep:
    srun = folder / "srun"
    srun.write_text(f"#!/bin/sh\n{script}\n")
    srun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_NTASKS": "9"}
    allocation = Allocation("7", ("n1", "n2", "n3"))
    return SlurmStep(allocation, ("n1", "n2", "n3"), ["agent"], environment, folder / "srun.log")


@pytest.fixture
def srun_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_an_srun_that_fails_is_reported_for_all_its_nodes(srun_on_path: Path) -> None:
    failing = step(srun_on_path, 'echo "srun: error: no $SLURM_NTASKS such node" >&2; exit 3')
    failing.start([0, 2])
    wait_until(lambda: len(failing.failures()) == 2, 10, "srun has ended")
    assert failing.failures().keys() == {0, 2}
    issue = failing.failures()[2]
    assert (issue.where, issue.message) == ("n3", "srun ended with code 3: srun: error: no  such node")
    failing.end()


def test_restarted_agents_have_a_separate_step(srun_on_path: Path) -> None:
    running = step(srun_on_path, "echo $*; exec sleep 60")
    running.start([0, 1])
    running.start([1])
    first, second = running.steps[0], running.steps[1]
    assert first is not second
    log = srun_on_path / "srun.log"
    wait_until(lambda: "--nodelist=n2" in log.read_text(), 10, "the second has started")
    first.kill()
    wait_until(lambda: running.failures().keys() == {0}, 10, "the first has ended")
    second.terminate()
    running.end()
    assert second.poll() is not None


def test_an_agent_without_the_run_directory_is_named_until_it_is_started_again(srun_on_path: Path) -> None:
    """srun continues for the others, so that only its output shows it."""
    flag = srun_on_path / "mounted"
    words = "n2 does not see the run directory of the launcher: No such file"
    unshared = step(srun_on_path, f'[ -e "{flag}" ] || echo "{words}"; exec sleep 20')
    unshared.start([0, 1])
    wait_until(unshared.failures, 10, "the agent of n2 has said so")
    ((node, issue),) = unshared.failures().items()
    assert (node, issue.rule, issue.where) == (1, "run-dir-not-shared", "n2")
    flag.touch()
    unshared.start([1])
    assert unshared.failures() == {}
    unshared.next_read = 0.0
    assert unshared.failures() == {}  # what was said before is not read again
    for srun in unshared.steps.values():
        srun.kill()
    unshared.end()
