"""The batch script of a run: what sbatch gets, and what `mpctl launch --submit --dry-run` shows.

The script runs on the first node of the job:

- `mpctl launch --resume` runs in the background, so that the shell can take signals. Slurm sends
  the batch shell alone SIGUSR1 (`--signal=B:`) some time before the time limit. The trap passes it
  on, the ranks finish their step and save, and the launcher ends with 128 + 10.
- The job is then requeued, if a step was saved since it began: a job whose limit is too short for
  one step would otherwise be requeued for ever. It keeps its id, and SLURM_RESTART_COUNT rises.
- So it is when a node was lost, which mpctl sees in seconds; Slurm itself, after its SlurmdTimeout
  of minutes, would end and requeue the job as well (`--requeue`).

Every value is quoted for the shell, which is also how sbatch reads its lines, and none may have a
line break, so that no setting can add a line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpctl.clusters.slurm.options import CONTROL, extra_issues, read_options
from mpctl.errors import Issue
from mpctl.spec.launch import SlurmSpec

GPU_OPTIONS = {"--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--tres-per-node"}
MEMORY_OPTIONS = {"--mem", "--mem-per-cpu", "--mem-per-gpu"}
BODY = """\
set -u
RUN={run}

newest_checkpoint() {{ ls -v "$RUN/checkpoints" 2>/dev/null | grep '^step-[0-9]*$' | tail -n 1; }}

before=$(newest_checkpoint)
echo "mpctl: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${{SLURM_RESTART_COUNT:-0}}," \\
  "from ${{before:-the start}}"
{command} &
launcher=$!
trap 'kill -USR1 "$launcher"' USR1
trap 'kill -TERM "$launcher"' TERM
# A signal ends a wait, and its trap runs: wait again until the launcher has ended.
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; done
wait "$launcher"
code=$?
trap - USR1 TERM
"""
REQUEUE = """\
why=
[ "$code" -eq 138 ] && why="it was stopped before its time limit"  # 128 + SIGUSR1
[ "$code" -eq 1 ] && [ -s "$RUN/nodes/lost" ] && why="$(paste -sd, "$RUN/nodes/lost") was lost"
if [ -n "$why" ]; then
  after=$(newest_checkpoint)
  if [ "$after" != "$before" ]; then
    echo "mpctl: $why; $after is saved; job $SLURM_JOB_ID is requeued"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script
  fi
  echo "mpctl: $why; job $SLURM_JOB_ID is not requeued, since it saved no step"
fi
"""


@dataclass(frozen=True)
class BatchJob:
    """What the script of a run is rendered from.

    name: of the job; run: its directory, an absolute path; nodes: of the plan; gpus: on each node,
    0 for a run on CPU; cpus: on each node, None for whole nodes; command: what runs the launch;
    signal_seconds: how long before the time limit Slurm sends SIGUSR1; settings: [launch.slurm].
    """

    name: str
    run: Path
    nodes: int
    gpus: int
    cpus: int | None
    command: Sequence[str]
    signal_seconds: int
    settings: SlurmSpec

    def log(self, job_id: str = "%j") -> str:
        """The file of the script's output; Slurm replaces %j by the job's id."""
        return f"{self.run}/logs/slurm-{job_id}.out"


def render_script(job: BatchJob) -> str:
    """The text of the batch script. Its values must have passed `script_issues`."""
    options = [f"#SBATCH {option}" for option in script_options(job)]
    body = BODY.format(run=shlex.quote(str(job.run)), command=shlex.join(job.command))
    requeue = REQUEUE if job.settings.requeue else ""
    return "\n".join(["#!/bin/bash", *options, "", f'{body}{requeue}exit "$code"', ""])


def script_options(job: BatchJob) -> Iterator[str]:
    """The options of sbatch, each as it stands behind #SBATCH."""
    settings = job.settings
    extra = read_options(settings.extra)
    yield _option("job-name", job.name)
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    yield from _device_options(job, {option.name for option in extra})
    for key in ("partition", "account", "time", "qos", "constraint"):
        if (value := getattr(settings, key)) is not None:
            yield _option(key, value)
    yield "--requeue" if settings.requeue else "--no-requeue"
    yield f"--signal=B:USR1@{job.signal_seconds}"
    yield "--open-mode=append"
    yield _option("output", f"{str(job.run).replace('%', '%%')}/logs/slurm-%j.out")
    yield from (option.text for option in extra)


def _device_options(job: BatchJob, extra: set[str]) -> Iterator[str]:
    """GPUs and CPUs of each node; whole nodes with all their memory where no CPUs are asked for.
    extra: names of the options that the user adds, which go before these."""
    if job.gpus and not extra & GPU_OPTIONS:
        yield f"--gpus-per-node={job.gpus}"
    if job.cpus is not None:
        yield f"--cpus-per-task={job.cpus}"
        return
    if "--exclusive" not in extra:
        yield "--exclusive"
    if not extra & MEMORY_OPTIONS:
        yield "--mem=0"


def script_issues(job: BatchJob) -> Iterator[Issue]:
    """What cannot stand in a batch script."""
    names = {"--run-dir": str(job.run)}
    if job.name != job.run.name:
        names["name"] = job.name
    for where, value in names.items():
        if CONTROL.search(value):
            message = f"{value!r} has a line break or another control character"
            yield Issue("slurm-text", where, message, "use a name without it")
    yield from extra_issues(job.settings.extra)


def _option(name: str, value: str) -> str:
    return f"--{name}={shlex.quote(value)}"
