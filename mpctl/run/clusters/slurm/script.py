"""The batch script of a run: what sbatch gets, and what `mpctl launch --submit --dry-run` shows.

The script runs on the first node of the job:

- `mpctl launch --resume` runs in the background, so that the shell can take signals. Slurm sends
  the batch shell alone SIGUSR1 (`--signal=B:`) some time before the time limit. The trap passes it
  on, the ranks finish their step and save, and the launcher ends with 128 + 10.
- The job is then requeued, if a step was saved since it began: a job whose limit is too short for
  one step would otherwise be requeued for ever. It keeps its id, and SLURM_RESTART_COUNT rises.
- It is also requeued when its launcher was killed, and when a node was lost, which mpctl detects in
  seconds; Slurm itself would end and requeue the job after its SlurmdTimeout of minutes
  (`--requeue`).
- A run that `mpctl stop` ended, and that saved, is a job that has succeeded: exit code 0.
- Nodes that are blamed for too many failures (RUN/nodes/excluded) are added to the nodes that the
  job is not to use. Slurm accepts that only for a job that waits: it is done right after the
  requeue, while the script still runs and ignores the SIGTERM that Slurm sends to its processes. A
  newly excluded node is a reason to requeue a job that saved no step: each is one only once.

Every value is quoted for the shell, which is also how sbatch reads its `#SBATCH` lines, and none
may have a line break, so that no setting can add a line. The same holds for the options of
launch.slurm.extra and launch.slurm.srun; sbatch and srun take the beginning of a long option for
the option itself, `--part` for `--partition`. Only the lines of launch.slurm.setup are bash, and
run as the user who submits: read a job file of others before it is submitted (--dry-run).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpctl.core.errors import Issue
from mpctl.spec.launch import SlurmSpec

DEPENDENCIES = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok")
ONE_DEPENDENCY = rf"(?:(?:{'|'.join(DEPENDENCIES)})(?::\d+(?:_(?:\d+|\*))?(?:\+\d+)?)+|singleton)"
DEPENDENCY = re.compile(rf"{ONE_DEPENDENCY}(?:(?:,{ONE_DEPENDENCY})*|(?:\?{ONE_DEPENDENCY})*)", re.IGNORECASE)
"""sbatch's grammar: `afterok:12:13,after:14+5` (all of them), `afterok:12?afterany:13_4` (any)."""
EXAMPLES = {"sbatch": "--mail-type=END", "srun": "--mpi=none"}
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
LONG = re.compile(r"(--[A-Za-z][A-Za-z0-9-]*)(?:(=| +)(.*))?")
SHORT = re.compile(r"(-[A-Za-z])( *)(.*)")
SET_BY = {
    "cluster.nodes": ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node"),
    "launch.threads_per_rank": ("--cpus-per-task", "-c"),
    "launch.slurm.partition": ("--partition", "-p"),
    "launch.slurm.account": ("--account", "-A"),
    "launch.slurm.time": ("--time", "-t"),
    "launch.slurm.qos": ("--qos", "-q"),
    "launch.slurm.constraint": ("--constraint", "-C"),
    "launch.slurm.dependency": ("--dependency", "-d"),
    "launch.slurm.array": ("--array", "-a"),
    "launch.slurm.requeue": ("--requeue", "--no-requeue"),
    "launch.slurm.signal_seconds": ("--signal",),
    "name": ("--job-name", "-J"),
    "--run-dir": ("--output", "-o", "--error", "-e", "--open-mode", "--chdir", "-D"),
}
"""Options that follow from another setting, by that setting."""
UNFIT = ("--wrap", "--parsable", "--test-only", "--wait", "-W", "--export")
"""Options that make another kind of job, or change what sbatch prints."""
STEP_SET_BY = {
    "cluster.nodes": ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--nodelist", "-w"),
    "the allocation": ("--jobid", "--exclude", "-x", "--relative", "-r"),
    "launch.slurm.container_image": ("--container-image",),
    "launch.slurm.container_mounts": ("--container-mounts",),
}
"""Options of srun that follow from another setting, by that setting."""
STEP_UNFIT = (
    "--overlap",
    "--cpu-bind",
    "--export",
    "--kill-on-bad-exit",
    "-K",
    "--wait",
    "-W",
    "-u",
    "-Q",
    "--unbuffered",
    "--quiet",
    "--output",
    "-o",
    "--error",
    "-e",
    "--input",
    "-i",
    "--pty",
    "--multi-prog",
    "--chdir",
    "-D",
    "--exclusive",
    "--het-group",
    "--bcast",
    "--label",
    "-l",
)
"""Options of srun with which the agents would not start, or not be heard."""


class ExtraOption(NamedTuple):
    """An option of sbatch. separator: between name and value, `=`, a space or nothing; value: empty
    for an option without one."""

    name: str
    separator: str
    value: str

    @property
    def text(self) -> str:
        """The option as written in a script, its value quoted."""
        value = shlex.quote(self.value) if self.value else ""
        return f"{self.name}{self.separator}{value}"

    @property
    def arguments(self) -> list[str]:
        """The option as arguments of a command."""
        if self.separator == " ":
            return [self.name, self.value]
        return [f"{self.name}{self.separator}{self.value}"]


def read_option(text: str) -> ExtraOption | None:
    """`--mail-type=END`, `-w n1`, `-wn1` or `--exclusive`; None for text that is no option or has
    a line break."""
    match = LONG.fullmatch(text) or SHORT.fullmatch(text)
    if match is None or CONTROL.search(text):
        return None
    name, separator, value = (part or "" for part in match.groups())
    return ExtraOption(name, separator[:1], value)


def read_options(texts: Sequence[str]) -> list[ExtraOption]:
    """The options in launch.slurm.extra that can be read."""
    return [option for text in texts if (option := read_option(text)) is not None]


def extra_issues(texts: Sequence[str]) -> Iterator[Issue]:
    """Yield the issues of launch.slurm.extra: words that are not options, options that follow from another setting,
    options for another kind of job."""
    return _option_issues(texts, "launch.slurm.extra", "sbatch", SET_BY, UNFIT)


def step_issues(texts: Sequence[str]) -> Iterator[Issue]:
    """Yield the issues of launch.slurm.srun."""
    return _option_issues(texts, "launch.slurm.srun", "srun", STEP_SET_BY, STEP_UNFIT)


def _option_issues(
    texts: Sequence[str], where: str, program: str, set_by: Mapping[str, Sequence[str]], unfit: Sequence[str]
) -> Iterator[Issue]:
    for text in texts:
        option = read_option(text)
        if option is None:
            hint = f"write each as on {program}'s command line, in one line: {EXAMPLES[program]}"
            yield Issue("slurm-extra", where, f"{text!r} is not an option of {program}", hint)
        elif setting := _setting_of(option.name, set_by):
            hint = f"use {setting}" if setting[:2] == "--" else f"use --set {setting}=..."
            if " " in setting:
                hint = "leave it out"
            yield Issue("slurm-extra", where, f"{text!r} follows from {setting}", hint)
        elif option.name in unfit:
            message = f"{text!r} does not fit a job of mpctl"
            yield Issue("slurm-extra", where, message, "leave it out")


def _setting_of(name: str, set_by: Mapping[str, Sequence[str]]) -> str | None:
    """The setting that an option, or an option with this beginning, follows from."""
    for setting, options in set_by.items():
        if name in options or (name[:2] == "--" and any(option.startswith(name) for option in options)):
            return setting
    return None


GPU_OPTIONS = {"--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--tres-per-node"}
MEMORY_OPTIONS = {"--mem", "--mem-per-cpu", "--mem-per-gpu"}
BODY = """\
{setup}set -u
RUN={run}

newest_checkpoint() {{ {newest} | tail -n 1; }}

excluded_nodes() {{ grep -sxE '[A-Za-z0-9._-]+' "$RUN/nodes/excluded" | sort | paste -sd, ; }}

before=$(newest_checkpoint)
excluded_before=$(excluded_nodes)
echo "mpctl: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${{SLURM_RESTART_COUNT:-0}}," \\
  "from ${{before:-the start}}"
{requeues}{command} &
launcher=$!
trap 'kill -USR1 "$launcher"' USR1
trap 'kill -TERM "$launcher"' TERM
# A signal ends a wait, and its trap runs: wait again until the launcher has ended.
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; done
wait "$launcher"
code=$?
trap - USR1 TERM
"""
NEWEST = """ls -v "$RUN/checkpoints" 2>/dev/null | grep '^step-[0-9]*$'"""
NEWEST_OF_PROGRAM = """find "$RUN/program/checkpoints" -mindepth 1 -printf '%T@ %P\\n' 2>/dev/null | sort -n"""
"""Lists what a run has saved, the newest last: of a program all that it writes there, with times,
as it may write to the same file again."""
STOPPED = """\
after=$(newest_checkpoint)
if [ "$code" -eq 143 ] && [ "$after" != "$before" ] && grep -qs '"now": false' "$RUN/stop-request"
then
  echo "mpctl: stopped as mpctl stop asked; $after is saved"
  exit 0
fi
"""
"""Exits with 0 after `mpctl stop` and a new checkpoint: jobs that depend on this one by afterok may begin."""
REQUEUE = """\
why=
case "$code" in
  134 | 135 | 136 | 137 | 139) why="its launcher was killed by signal $((code - 128))" ;;
  138) why="it was stopped before its time limit" ;;  # 128 + SIGUSR1
  1) [ -s "$RUN/nodes/lost" ] && why=$(paste -sd, "$RUN/nodes/lost") ;;
esac
excluded=$(excluded_nodes)
if [ -n "$why" ] && [ "$after" = "$before" ] && [ "$excluded" = "$excluded_before" ]; then
  echo "mpctl: $why; job $SLURM_JOB_ID is not requeued, since it saved no step"
elif [ -n "$why" ]; then
  list=$(scontrol --oneliner show job "$SLURM_JOB_ID" | grep -o ' ExcNodeList=[^ (]*')
  list=${list# ExcNodeList=}
  trap '' TERM  # which Slurm sends to the processes of a job that it requeues
  saved="${after:-no step} is saved"
  if ! said=$(scontrol requeue "$SLURM_JOB_ID" 2>&1); then
    echo "mpctl: $why; $saved; job $SLURM_JOB_ID is not requeued: $said"
  elif [ -z "$excluded" ]; then
    echo "mpctl: $why; $saved; job $SLURM_JOB_ID is requeued"
  elif said=$(scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${list:+$list,}$excluded" 2>&1)
  then
    echo "mpctl: $why; $saved; job $SLURM_JOB_ID is requeued without $excluded"
  else
    echo "mpctl: $why; $saved; job $SLURM_JOB_ID is requeued, also with $excluded: $said"
  fi
fi
"""


@dataclass(frozen=True)
class BatchJob:
    """The values of the script of a run.

    name: of the job; run: its directory, an absolute path; nodes: of the plan, and spare ones;
    gpus: on each node, 0 for a run on CPU; cpus: on each node, None for whole nodes; command: what
    runs the launch; signal_seconds: how long before the time limit Slurm sends SIGUSR1; settings:
    [launch.slurm]; runs_program: whether the ranks run launch.program.
    """

    name: str
    run: Path
    nodes: int
    gpus: int
    cpus: int | None
    command: Sequence[str]
    signal_seconds: int
    settings: SlurmSpec
    runs_program: bool = False

    def log(self, job_id: str = "%j") -> str:
        """The file of the script's output; Slurm replaces %j by the job's id."""
        return f"{self.run}/logs/slurm-{job_id}.out"


def render_script(job: BatchJob) -> str:
    """The text of the batch script. Its values must have passed `script_issues`."""
    options = [f"#SBATCH {option}" for option in script_options(job)]
    setup = "".join(f"{line}\n" for line in job.settings.setup)
    newest = NEWEST_OF_PROGRAM if job.runs_program else NEWEST
    requeue, flag = (REQUEUE, "export MPCTL_REQUEUES=1\n") if job.settings.requeue else ("", "")
    run, command = shlex.quote(str(job.run)), shlex.join(job.command)
    body = BODY.format(setup=setup, run=run, command=command, requeues=flag, newest=newest)
    return "\n".join(["#!/bin/bash", *options, "", f'{body}{STOPPED}{requeue}exit "$code"', ""])


def script_options(job: BatchJob) -> Iterator[str]:
    """The options of sbatch, each as written after #SBATCH."""
    settings = job.settings
    extra = read_options(settings.extra)
    yield _option("job-name", job.name)
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    yield from _device_options(job, {option.name for option in extra})
    for key in ("partition", "account", "time", "qos", "constraint", "dependency"):
        if (value := getattr(settings, key)) is not None:
            yield _option(key, value)
    yield "--requeue" if settings.requeue else "--no-requeue"
    yield f"--signal=B:USR1@{job.signal_seconds}"
    yield "--open-mode=append"
    yield _option("output", f"{str(job.run).replace('%', '%%')}/logs/slurm-%j.out")
    yield from (option.text for option in extra)


def _device_options(job: BatchJob, extra: set[str]) -> Iterator[str]:
    """GPUs and CPUs of each node; whole nodes with all their memory where no CPUs are requested and nodes are not
    shared. extra: names of the options that the user adds, which take precedence."""
    if job.gpus and not extra & GPU_OPTIONS:
        yield f"--gpus-per-node={job.gpus}"
    if job.cpus is not None:
        yield f"--cpus-per-task={job.cpus}"
    if job.cpus is not None or not job.settings.exclusive:
        return
    if "--exclusive" not in extra:
        yield "--exclusive"
    if not extra & MEMORY_OPTIONS:
        yield "--mem=0"


def script_issues(job: BatchJob) -> Iterator[Issue]:
    """Values that a batch script cannot contain."""
    names = {"--run-dir": str(job.run)}
    if job.name != job.run.name:
        names["name"] = job.name
    for where, value in names.items():
        if CONTROL.search(value):
            message = f"{value!r} has a line break or another control character"
            yield Issue("slurm-text", where, message, "use a name without it")
    for line in job.settings.setup:
        if CONTROL.search(line.replace("\t", " ")):
            message = f"{line!r} has a line break or another control character"
            yield Issue("slurm-text", "launch.slurm.setup", message, "give each line by itself")
    if (text := job.settings.dependency) is not None and not DEPENDENCY.fullmatch(text):
        message = f"{text!r} is no dependency of sbatch"
        hint = f"write KIND:JOB, joined by , (all) or ? (any); KIND: {', '.join(DEPENDENCIES)}"
        yield Issue("slurm-dependency", "launch.slurm.dependency", message, hint)
    yield from extra_issues(job.settings.extra)


def _option(name: str, value: str) -> str:
    return f"--{name}={shlex.quote(value)}"
