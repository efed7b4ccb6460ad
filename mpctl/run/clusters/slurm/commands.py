"""Running sbatch, squeue, scancel and others. Arguments are lists, never a shell."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mpctl.core.errors import InputError, Issue, RunFailed
from mpctl.run.clusters.backend import ScheduledJob, require_form
from mpctl.run.clusters.slurm.variables import OF_QUERIES, overriding
from mpctl.spec.job import JobSpec

SECONDS = 30.0
"""Time limit of one command; a busy controller answers in seconds."""
SUBMITTED = re.compile(r"(\d+)(?:;\S+)?")
JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?")
SQUEUE = ("squeue", "--noheader", "--states=all", "--format=%T|%r|%M|%l|%N")
"""Command that prints the input of `read_job`, without the job's id: state, reason, time used, time limit, nodes."""
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
"""States in which a job runs no more; Slurm forgets it some minutes later."""


def slurm_output(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run one of Slurm's commands and return its output. environment: this process's when absent.
    Raises InputError when this host does not have the command, and RunFailed when it fails or does
    not answer within SECONDS."""
    name = command[0]
    environment = os.environ if environment is None else environment
    passed = {key: value for key, value in environment.items() if not key.startswith(OF_QUERIES)}
    try:
        done = subprocess.run(
            [*command],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
            env=passed,
        )
    except FileNotFoundError:
        hint = "log in to a host of the cluster, or use --on local or --on ssh"
        raise InputError.of("no-slurm", "--on", f"{name} is not on this host", hint) from None
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{name} did not answer within {SECONDS:g} s; run: scontrol ping") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise RunFailed(f"{name} failed: {said}")
    return done.stdout


def submit(script: Path, options: Iterable[str], shell: Mapping[str, str]) -> str:
    """Submit a batch script; returns the id of the job. options: of its #SBATCH lines, which go
    before the variables of the shell. Raises RunFailed with sbatch's message."""
    dropped = overriding(options, shell)
    passed = {name: value for name, value in shell.items() if name not in dropped}
    output = slurm_output(("sbatch", "--parsable", str(script)), passed).strip()
    match = SUBMITTED.fullmatch(output.splitlines()[-1] if output else "")
    if match is None:
        raise RunFailed(f"sbatch printed {output!r} in place of a job's id")
    return match[1]


def setup_issues(lines: Sequence[str]) -> Iterator[Issue]:
    """Check the lines of launch.slurm.setup with `bash -n`, which runs nothing; without bash, check
    nothing."""
    try:
        done = subprocess.run(
            ["bash", "-n"],
            input="\n".join([*lines, ""]),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        message = f"the lines are no bash: {said[0].removeprefix('bash: ')}"
        hint = "try them: bash -n FILE; a loop or an if may span several lines"
        yield Issue("slurm-setup", "launch.slurm.setup", message, hint)


class SlurmScheduler:
    """The submitted jobs of the cluster of this host, for `mpctl status` and `mpctl stop`."""

    def __init__(self, job: JobSpec) -> None:
        pass

    def find(self, job_id: str) -> ScheduledJob | None:
        try:
            return read_job(slurm_output((*SQUEUE, f"--jobs={_require(job_id)}")))
        except RunFailed as error:
            if "Invalid job id" in str(error):
                return None
            raise

    def cancel(self, job_id: str) -> None:
        """End the job: its processes get SIGTERM, and SIGKILL after Slurm's KillWait."""
        slurm_output(("scancel", _require(job_id)))


def read_job(listing: str) -> ScheduledJob | None:
    """The job in the output of `SQUEUE`, such as `PENDING (Resources)` or `RUNNING on n[1-2] for
    3:21 of 12:00:00`; None when Slurm has forgotten the job. Raises InputError for other output."""
    if not listing:
        return None
    line = listing.splitlines()[0]
    fields = line.split("|")
    if len(fields) != 5:
        message = f"cannot read {line!r} in the output of squeue"
        raise InputError.of("squeue", "squeue", message, f"run: {' '.join(SQUEUE)}")
    state, reason, elapsed, limit, nodes = fields
    reason = "" if reason == "None" else reason.strip("()")
    text = f"{state} ({reason})" if reason else state
    if state == "RUNNING":
        text = f"{state} on {nodes} for {elapsed} of {limit}"
    return ScheduledJob(text, is_active=state not in ENDED, has_begun=state not in WAITING)


def _require(job_id: str) -> str:
    return require_form(job_id, JOB_ID, "the number of a Slurm job", "launcher.json: job_id")
