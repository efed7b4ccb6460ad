"""Running Slurm's commands: sinfo, sbatch, squeue, scancel. Arguments are lists, never a shell."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mpctl.clusters.slurm.job_state import SQUEUE, JobState, read_job_state
from mpctl.clusters.slurm.partitions import SINFO, Partition, read_partitions
from mpctl.errors import InputError, RunFailed

SECONDS = 30.0
"""How long one command may take; a busy controller answers in seconds."""
SUBMITTED = re.compile(r"(\d+)(?:;\S+)?")


def find_partitions() -> list[Partition]:
    """All partitions of the cluster. Raises InputError without Slurm, RunFailed when it does not
    answer."""
    return read_partitions(slurm_output(SINFO))


def submit(script: Path) -> str:
    """Submit a batch script; the id of the job. Raises RunFailed with what sbatch says."""
    output = slurm_output(("sbatch", "--parsable", str(script))).strip()
    match = SUBMITTED.fullmatch(output.splitlines()[-1] if output else "")
    if match is None:
        raise RunFailed(f"sbatch printed {output!r} in place of a job's id")
    return match[1]


def find_job(job_id: str) -> JobState | None:
    """The state of a job; None when Slurm does not know it any more."""
    try:
        return read_job_state(slurm_output((*SQUEUE, f"--jobs={job_id}")))
    except RunFailed as error:
        if "Invalid job id" in str(error):
            return None
        raise


def cancel(job_id: str) -> None:
    """End a job: its processes get SIGTERM, and SIGKILL after Slurm's KillWait."""
    slurm_output(("scancel", job_id))


def slurm_output(command: Sequence[str]) -> str:
    """What one of Slurm's commands prints. Raises InputError when this host does not have it, and
    RunFailed when it fails or does not answer within SECONDS."""
    name = command[0]
    try:
        done = subprocess.run(
            [*command], capture_output=True, text=True, errors="replace", timeout=SECONDS,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        hint = "log in to a host of the cluster, or use --on local or --on ssh"
        raise InputError.of("no-slurm", "--on", f"{name} is not on this host", hint) from None
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{name} did not answer within {SECONDS:g} s; run: scontrol ping") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise RunFailed(f"{name} failed: {said}")
    return done.stdout
