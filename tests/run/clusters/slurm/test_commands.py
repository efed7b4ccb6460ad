"""Slurm's commands as processes, with stand-ins that print what the real ones do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mpctl.core.errors import InputError, RunFailed
from mpctl.run.clusters.slurm import commands
from mpctl.run.clusters.slurm.commands import SlurmScheduler, read_job, setup_issues, submit
from mpctl.run.clusters.slurm.partitions import find_partitions
from tests.jobs import job_of

Stand = Callable[[str, str], None]
SLURM = SlurmScheduler(job_of({}))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Makes a command of a name with a script of sh; no other command is found."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return make


@pytest.mark.parametrize("printed", ["123", "123;cluster", "some plugin says hello\\n123"])
def test_the_id_of_a_submitted_job(stand_in: Stand, tmp_path: Path, printed: str) -> None:
    stand_in("sbatch", f'[ "$1" = --parsable ] && printf "{printed}\\n"')
    assert submit(tmp_path / "slurm.sh", ["--partition=main"], os.environ) == "123"


def test_a_refusal_of_sbatch_is_reported_in_its_words(stand_in: Stand, tmp_path: Path) -> None:
    stand_in("sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    with pytest.raises(RunFailed, match="sbatch failed: sbatch: error: Invalid account"):
        submit(tmp_path / "slurm.sh", ["--partition=main"], os.environ)
    stand_in("sbatch", "echo later")
    with pytest.raises(RunFailed, match="'later' in place of a job's id"):
        submit(tmp_path / "slurm.sh", ["--partition=main"], os.environ)


@pytest.mark.parametrize(
    ("line", "state", "is_active", "has_begun"),
    [
        ("PENDING|Resources|0:00|1:00:00|", "PENDING (Resources)", True, False),
        ("RUNNING|None|3:21|12:00:00|n[1-2]", "RUNNING on n[1-2] for 3:21 of 12:00:00", True, True),
        ("COMPLETED|None|0:01|UNLIMITED|n1", "COMPLETED", False, True),
        ("FAILED|NonZeroExitCode|0:01|1:00|n1", "FAILED (NonZeroExitCode)", False, True),
        ("COMPLETING|None|0:01|1:00|n1", "COMPLETING", True, True),
    ],
)
def test_a_line_of_squeue(stand_in: Stand, line: str, state: str, is_active: bool, has_begun: bool) -> None:
    stand_in("squeue", f"echo '{line}'")
    job = SLURM.find("7")
    assert job is not None
    assert (job.state, job.is_active, job.has_begun) == (state, is_active, has_begun)


def test_a_job_that_slurm_has_forgotten_and_other_output(stand_in: Stand) -> None:
    stand_in("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert SLURM.find("7") is None
    assert read_job("") is None
    with pytest.raises(InputError, match="output of squeue"):
        read_job("slurm_load_jobs error")


def test_a_controller_that_does_not_answer(stand_in: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(RunFailed, match="Unable to contact slurm controller"):
        SLURM.find("7")
    monkeypatch.setattr(commands, "SECONDS", 0.2)
    stand_in("sinfo", "exec /bin/sleep 30")
    with pytest.raises(RunFailed, match=r"did not answer within 0\.2 s"):
        find_partitions()


def test_a_host_without_slurm(stand_in: Stand) -> None:
    with pytest.raises(InputError, match="sinfo is not on this host"):
        find_partitions()


def test_variables_of_the_shell_neither_replace_options_nor_filter_lists(
    stand_in: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_USERS", "nobody")
    stand_in("squeue", 'echo "RUNNING|None|${SQUEUE_USERS-0:01}|1:00|n1"')
    assert (job := SLURM.find("7")) is not None and "for 0:01" in job.state
    stand_in("sbatch", 'echo "$SBATCH_PARTITION$SBATCH_WAIT${SBATCH_RESERVATION}7"')
    shell = {**os.environ, "SBATCH_PARTITION": "short", "SBATCH_WAIT": "1", "SBATCH_RESERVATION": "4"}
    assert submit(tmp_path / "slurm.sh", ["--partition=main"], shell) == "47"


def test_setup_lines_that_are_no_bash() -> None:
    assert list(setup_issues(["if true; then", "module load cuda", "fi"])) == []
    for lines in (["if true; then", "fi"], ["echo 'a"], ["for x in 1 2"]):
        (issue,) = setup_issues(lines)
        assert issue.where == "launch.slurm.setup" and "line" in issue.message, issue
