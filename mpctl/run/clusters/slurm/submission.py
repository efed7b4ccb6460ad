"""`--on slurm --submit`: a run whose directory is complete is handed to sbatch.

The request to Slurm and its issues are functions of the plan and of sinfo's listing alone. The job
runs `mpctl launch --resume --on slurm` on the run directory (script.py), at first and after every
requeue.

Slurm sends SIGUSR1 `signal_seconds` before the time limit, up to a minute earlier; from then on the
ranks finish their step and write a checkpoint. How fast a file system writes is not known before it
has written. A job is therefore refused only where even FASTEST_WRITE would not do, and the time for
saving is computed with SLOWEST_WRITE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from pathlib import Path

from mpctl.core.durable import write_whole
from mpctl.core.errors import InputError, Issue, RunFailed
from mpctl.core.units import bytes_text, seconds_text
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.run.clusters.slurm.array import render_array
from mpctl.run.clusters.slurm.commands import setup_issues, submit
from mpctl.run.clusters.slurm.containers import container_issues
from mpctl.run.clusters.slurm.partitions import (
    NodeRequest,
    Partition,
    chosen_partition,
    find_partitions,
    request_issues,
    time_limit_seconds,
    time_limit_text,
)
from mpctl.run.clusters.slurm.script import BatchJob, render_script, script_issues, script_options
from mpctl.run.clusters.slurm.variables import ignored_text, with_shell
from mpctl.run.hosts.checks import Device, device_memory_issues, named_device
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import SlurmSpec

FASTEST_WRITE, SLOWEST_WRITE = 2e9, 2e8
"""Bytes per second that one node writes to a fast parallel file system, and to a busy NFS."""
LEAST_SIGNAL_SECONDS = 120
MOST_SIGNAL_SECONDS = 65_535  # of sbatch's --signal


@dataclass(frozen=True)
class SaveNeed:
    """Time and bytes of stopping with a checkpoint. step_seconds: 0 if no step time is estimated."""

    step_seconds: float
    checkpoint_bytes: int
    nodes: int

    def seconds(self, rate: float) -> float:
        """Seconds to finish a step and save, at so many bytes per second of each node.

        >>> need = SaveNeed(step_seconds=10, checkpoint_bytes=80 * 10**9, nodes=2)
        >>> need.seconds(FASTEST_WRITE), need.seconds(SLOWEST_WRITE)
        (30.0, 210.0)
        """
        return self.step_seconds + self.checkpoint_bytes / (rate * self.nodes)

    def __str__(self) -> str:
        step = f"a step of {seconds_text(self.step_seconds)} and " if self.step_seconds else ""
        return f"{step}a checkpoint of {bytes_text(self.checkpoint_bytes)}"


def default_signal_seconds(need: SaveNeed, limit: float) -> int:
    """Twice the seconds that a slow save takes, at least LEAST_SIGNAL_SECONDS, but no more than
    half of the time limit (seconds, infinity without one)."""
    wanted = max(LEAST_SIGNAL_SECONDS, ceil(2 * need.seconds(SLOWEST_WRITE)))
    half = MOST_SIGNAL_SECONDS if limit == inf else max(1, int(limit / 2))
    return min(wanted, half, MOST_SIGNAL_SECONDS)


def limit_issues(need: SaveNeed, limit: float, signal_seconds: int | None) -> Iterator[Issue]:
    """Yield the reasons why nothing could be saved within the limit. limit: seconds, infinity without one;
    signal_seconds: as set by the user, None if derived."""
    least = need.seconds(FASTEST_WRITE)
    rate = f"{FASTEST_WRITE / 1e9:g} GB/s a node"
    if limit < least:
        message = f"{time_limit_text(limit)} is shorter than {need}, {seconds_text(least)} at {rate}"
        hint = f"use {time_limit_text(ceil(4 * least / 60) * 60)} or more"
        yield Issue("slurm-time", "launch.slurm.time", message, hint)
    if signal_seconds is None:
        return
    where = "launch.slurm.signal_seconds"
    if signal_seconds < least:
        message = f"{signal_seconds} s are shorter than {need}, {seconds_text(least)} at {rate}"
        yield Issue("slurm-signal", where, message, f"use {ceil(2 * least)} or more")
    if signal_seconds >= limit:
        message = f"{signal_seconds} s, but the whole time limit is {time_limit_text(limit)}"
        hint = f"use {max(1, int(limit / 2))} or less, or a larger launch.slurm.time"
        yield Issue("slurm-signal", where, message, hint)


@dataclass(frozen=True)
class Submission:
    """A plan that is to be submitted to a Slurm with these partitions; without any, to one that is
    not known here. shell: variables of the shell that submits (variables.py)."""

    plan: Plan
    partitions: Sequence[Partition]
    shell: Mapping[str, str]

    @cached_property
    def settings(self) -> SlurmSpec:
        """[launch.slurm], and what the shell fills in. Raises InputError (with_shell)."""
        return with_shell(self.plan.job.launch.slurm, self.shell)

    @property
    def partition(self) -> Partition | None:
        """The partition of the job; None if it does not exist."""
        return chosen_partition(self.partitions, self.settings.partition)

    @property
    def device(self) -> Device:
        """Device of the ranks; if the job sets none, cuda on nodes with GPUs. Raises InputError for a kind that mpctl
        only plans."""
        if device := named_device(self.plan.job):
            return device
        groups = self.partition.groups if self.partition else ()
        return "cuda" if any(group.gpus for group in groups) else "cpu"

    @property
    def ranks_per_node(self) -> int:
        return self.plan.job.cluster.gpus_per_node or 1

    @property
    def cpus(self) -> int | None:
        """CPUs of each node that the job asks for; None for whole nodes."""
        threads = self.plan.job.launch.threads_per_rank
        return None if threads is None else threads * self.ranks_per_node

    @property
    def request(self) -> NodeRequest:
        """The request for each node. Raises InputError for a time limit that cannot be read."""
        time = self.settings.time
        return NodeRequest(
            nodes=self.plan.job.cluster.nodes + self.plan.job.launch.spare_nodes,
            gpus=self.ranks_per_node if self.device == "cuda" else 0,
            cpus=self.cpus or (1 if self.device == "cuda" else self.ranks_per_node),
            memory_bytes=self._host_memory() if self.device == "cpu" else 0,
            partition=self.settings.partition,
            seconds=None if time is None else time_limit_seconds(time),
        )

    def _host_memory(self) -> int:
        """Bytes at the peak of a step on the fullest node, if that is to be checked; the ranks of a
        node may all be of one stage."""
        estimate = self.plan.estimate
        if estimate is None or not self.plan.job.launch.check_memory:
            return 0
        return max(stage.allocated_bytes for stage in estimate.memory) * self.ranks_per_node

    @property
    def limit(self) -> float:
        """The time limit of the job, else of the partition, seconds; infinity without one."""
        seconds = self.request.seconds
        if seconds is not None:
            return seconds
        return self.partition.time_limit if self.partition else inf

    @property
    def save_need(self) -> SaveNeed:
        """Time of a step and bytes of a checkpoint; 0 if not estimated."""
        estimate = self.plan.estimate
        if estimate is None:
            return SaveNeed(0.0, 0, 1)
        seconds = estimate.step_seconds or 0.0
        return SaveNeed(seconds, estimate.checkpoint_bytes, self.plan.job.cluster.nodes)

    def issues(self, run: Path) -> Iterator[Issue]:
        """Everything that is wrong with it, all at once. run: the run directory."""
        if self.device == "cuda" and self.plan.job.launch.check_memory:
            yield from device_memory_issues(self.plan)
        try:
            request = self.request
        except InputError as error:
            yield from error.issues
        else:
            if self.partitions:
                yield from request_issues(self.partitions, request)
            yield from limit_issues(self.save_need, self.limit, self.settings.signal_seconds)
            yield from script_issues(self.batch_job(run))
        yield from container_issues(self.settings)

    def batch_job(self, run: Path) -> BatchJob:
        """The values of the batch script. run: the run directory."""
        job, path = self.plan.job, run.absolute()
        signal_seconds = self.settings.signal_seconds
        # This Python, which all nodes must have at the same path.
        launch = ["mpctl", "launch", "--resume", "--run-dir", str(path), "--on", "slurm"]
        return BatchJob(
            name=job.name or run.name,
            run=path,
            nodes=self.request.nodes,
            gpus=self.request.gpus,
            cpus=self.cpus,
            command=[sys.executable, "-P", "-m", *launch],
            signal_seconds=signal_seconds or default_signal_seconds(self.save_need, self.limit),
            settings=self.settings,
            runs_program=bool(job.launch.program),
        )


def device_issues(job: JobSpec) -> Iterator[Issue]:
    """Require launch.device when no Slurm can say whether its nodes have GPUs."""
    if named_device(job) is None:
        message = "auto, and neither the job's cluster nor a Slurm tells the device: jobs get GPUs "
        yield Issue(
            "device-unknown",
            "launch.device",
            f"{message}only where they are asked for",
            "say --device cuda or --device cpu",
        )


class SlurmSubmitter:
    """Runs as batch jobs of the Slurm that this host belongs to."""

    name = "slurm"

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        self.job, self.shell = job, environment

    @property
    def shown_anywhere(self) -> bool:
        """Whether no Slurm answers: a dry run then shows the script and says that it was not compared."""
        return isinstance(self._asked, Issue)

    @property
    def partitions(self) -> Sequence[Partition]:
        """Partitions that sinfo lists; empty if no Slurm answers."""
        return () if isinstance(self._asked, Issue) else self._asked

    @cached_property
    def _asked(self) -> Sequence[Partition] | Issue:
        try:
            return find_partitions()
        except InputError as error:
            return error.issues[0]
        except RunFailed as error:
            hint = "mend it (scontrol ping), or log in to a host of the cluster"
            return Issue("no-slurm", "--on", str(error), hint)

    def check(self, plan: Plan, run: RunDir, *, is_elsewhere: bool) -> list[Issue]:
        """Raises InputError, with all else that is wrong, where no Slurm answers and one has to."""
        issues = list(self._submission(plan).issues(run.path))
        issues += setup_issues(plan.job.launch.slurm.setup)
        if isinstance(self._asked, Issue):
            if not is_elsewhere:
                raise InputError([self._asked, *issues])
            issues += device_issues(plan.job)
        return issues

    def dry_run(self, plan: Plan, run: RunDir) -> list[Issue]:
        """Nothing more: the checks have read sinfo."""
        return []

    def document(self, plan: Plan, run: RunDir) -> str:
        script = render_script(self._submission(plan).batch_job(run.path))
        if not isinstance(self._asked, Issue):
            return script
        why = self._asked.message.splitlines()[0]
        return f"{script}# not compared with the partitions of a Slurm: {why}\n"

    def submit(self, plan: Plan, run: RunDir) -> str:
        self._write_script(plan, run)
        return submit(run.batch_script, self._options(plan, run), self.shell)

    def notes(self, plan: Plan, run: RunDir) -> list[str]:
        """Return a note on the shell's variables that are not passed on to sbatch."""
        text = ignored_text(self._options(plan, run), self.shell)
        return [] if text is None else [text]

    def _submission(self, plan: Plan) -> Submission:
        return Submission(plan, self.partitions, self.shell)

    def _options(self, plan: Plan, run: RunDir) -> list[str]:
        return list(script_options(self._submission(plan).batch_job(run.path)))

    def _write_script(self, plan: Plan, run: RunDir) -> None:
        (run.path / "logs").mkdir(exist_ok=True)
        write_whole(run.batch_script, self.document(plan, run))

    # ------------------------------------------------------------ arrays

    def array_document(self, tasks: Sequence[tuple[Plan, RunDir]], folder: Path) -> str:
        """Return the script of an array of runs in the directories FOLDER/task-N."""
        jobs = [self._submission(plan).batch_job(run.path) for plan, run in tasks]
        settings = [f"task-{n}: {json.dumps(one)}" for n, one in enumerate(self._array)]
        return render_array(jobs, folder.absolute(), settings)

    def submit_array(self, tasks: Sequence[tuple[Plan, RunDir]], folder: Path) -> tuple[str, list[str]]:
        """Write the scripts and submit the array; its id, and that of each of its tasks."""
        for plan, run in tasks:
            self._write_script(plan, run)
        script = RunDir(folder).batch_script
        write_whole(script, self.array_document(tasks, folder))
        plan, run = tasks[0]  # all have the same options, but for the name and the log
        job_id = submit(script, self._options(plan, run), self.shell)
        return job_id, [f"{job_id}_{number}" for number in range(len(tasks))]

    @property
    def _array(self) -> Sequence[Mapping[str, object]]:
        return self.job.launch.slurm.array
