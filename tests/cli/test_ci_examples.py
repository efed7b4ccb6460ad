"""examples/ci: the lines of the workflow and of the hook, run on a job and its change in a git repository."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

CI = Path(__file__).parents[2] / "examples" / "ci"
WORKFLOW: Any = yaml.safe_load((CI / "mpctl.yml").read_text("utf-8"))
HOOKS: Any = yaml.safe_load((CI / "pre-commit-config.yaml").read_text("utf-8"))
JOB = """[cluster]
preset = "dgx-h100"
nodes = 1
[model]
preset = "llama-3-8b"
[parallel]
tp = 8
sequence_parallel = true
[training]
runtime = "megatron-core"
global_batch_size = 8
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a job, its workflow's script, and mpctl on the path."""
    bin_, here = tmp_path / "bin", tmp_path / "repository"
    bin_.mkdir()
    (bin_ / "mpctl").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mpctl "$@"\n', "utf-8")
    (bin_ / "mpctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(CI.parents[1]))
    (here / "jobs").mkdir(parents=True)
    (here / "jobs" / "a.toml").write_text(JOB, "utf-8")
    (here / "ci").mkdir()
    shutil.copy(CI / "gate.sh", here / "ci")
    monkeypatch.chdir(here)
    name = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["commit", "-qm", "base"],
        ["update-ref", "refs/remotes/origin/main", "HEAD"],
    ):
        subprocess.run(["git", *name, *words], check=True)
    return here


def run(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-e", "-c", command], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def gate_step() -> dict[str, Any]:
    (step,) = (step for step in WORKFLOW["jobs"]["plan"]["steps"] if "env" in step)
    return dict(step)


def test_the_workflow_fails_a_change_beyond_a_gate_and_writes_the_summary(repository: Path) -> None:
    """Full recomputation of every layer costs about a third of a step: above +5 %."""
    job, summary = repository / "jobs" / "a.toml", repository.parent / "summary.md"
    job.write_text(JOB.replace("[training]", '[training]\nrecompute = "full"'), "utf-8")
    step = gate_step()
    said = run(step["run"], **step["env"], GITHUB_BASE_REF="main", GITHUB_STEP_SUMMARY=str(summary))
    assert said.returncode == 4, said.stderr
    assert "✗ jobs/a.toml: step " in said.stdout and "✓ jobs/a.toml: memory " in said.stdout
    assert "✓ fits" in said.stdout
    assert summary.read_text("utf-8") == f"```\n{said.stdout}```\n"


@pytest.mark.slow
def test_the_hook_passes_a_job_that_costs_the_same(repository: Path) -> None:
    (hook,) = HOOKS["repos"][0]["hooks"]
    (repository / "jobs" / "a.toml").write_text(f"# the same\n{JOB}", "utf-8")
    said = run(shlex.join([*shlex.split(hook["entry"]), "jobs/a.toml"]))
    assert said.returncode == 0 and said.stdout.count("passed") == 2, said.stderr


@pytest.mark.slow
def test_a_job_that_does_not_fit_or_is_not_legal_fails_with_its_own_code(repository: Path) -> None:
    job = repository / "jobs" / "new.toml"
    job.write_text(JOB.replace("tp = 8\nsequence_parallel = true", "tp = 1"), "utf-8")
    said = run("ci/gate.sh HEAD jobs/new.toml")  # there is nothing to compare it with
    assert said.returncode == 3 and "✗ does not fit" in said.stdout
    job.write_text(JOB.replace("tp = 8", "tp = 7"), "utf-8")
    said = run("ci/gate.sh HEAD jobs/new.toml")
    assert said.returncode == 2 and "tp 7" in said.stdout


def test_the_workflow_has_the_published_form_and_few_rights() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*check, str(CI / "mpctl.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert WORKFLOW["permissions"] == {"contents": "read"}
