"""What a plan asks of Slurm, and what is wrong with it: from the plan and sinfo's listing alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from mpctl.clusters.slurm.limits import SaveNeed, default_signal_seconds, limit_issues
from mpctl.clusters.slurm.partitions import (
    NodeRequest,
    Partition,
    chosen_partition,
    request_issues,
)
from mpctl.clusters.slurm.script import BatchJob, script_issues
from mpctl.clusters.slurm.times import time_limit_seconds
from mpctl.errors import InputError, Issue
from mpctl.launch.node.host import Device, device_memory_issues, named_device
from mpctl.planning.plan import Plan
from mpctl.spec.launch import SlurmSpec


@dataclass(frozen=True)
class Submission:
    """A plan that is to be submitted to a Slurm with these partitions."""

    plan: Plan
    partitions: Sequence[Partition]

    @property
    def settings(self) -> SlurmSpec:
        """The table [launch.slurm]."""
        return self.plan.job.launch.slurm

    @property
    def partition(self) -> Partition | None:
        """The partition of the job; None where there is no such."""
        return chosen_partition(self.partitions, self.settings.partition)

    @property
    def device(self) -> Device:
        """Where ranks run; where the job leaves it open, cuda on nodes with GPUs. Raises InputError
        for a kind that mpctl only plans."""
        if device := named_device(self.plan.job):
            return device
        groups = self.partition.groups if self.partition else ()
        return "cuda" if any(group.gpus for group in groups) else "cpu"

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node of the plan."""
        return self.plan.job.cluster.gpus_per_node or 1

    @property
    def cpus(self) -> int | None:
        """CPUs of each node that the job asks for; None for whole nodes."""
        threads = self.plan.job.launch.threads_per_rank
        return None if threads is None else threads * self.ranks_per_node

    @property
    def request(self) -> NodeRequest:
        """What is asked of each node. Raises InputError for a time limit that cannot be read."""
        time = self.settings.time
        return NodeRequest(
            nodes=self.plan.job.cluster.nodes,
            gpus=self.ranks_per_node if self.device == "cuda" else 0,
            cpus=self.cpus or (1 if self.device == "cuda" else self.ranks_per_node),
            memory_bytes=self._host_memory() if self.device == "cpu" else 0,
            partition=self.settings.partition,
            seconds=None if time is None else time_limit_seconds(time),
        )

    def _host_memory(self) -> int:
        """Bytes at the peak of a step on the node with most of them, where that is to be checked;
        the ranks of a node may be of one stage."""
        estimate = self.plan.estimate
        if estimate is None or not self.plan.job.launch.check_memory:
            return 0
        return max(stage.allocated_bytes for stage in estimate.memory) * self.ranks_per_node

    @property
    def limit(self) -> float:
        """The time limit of the job: its own or the partition's, seconds; infinity without one."""
        seconds = self.request.seconds
        if seconds is not None:
            return seconds
        return self.partition.time_limit if self.partition else inf

    @property
    def save_need(self) -> SaveNeed:
        """What a step and a checkpoint take; nothing where it is not estimated."""
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
            yield from request_issues(self.partitions, request)
            yield from limit_issues(self.save_need, self.limit, self.settings.signal_seconds)
            yield from script_issues(self.batch_job(run))

    def batch_job(self, run: Path) -> BatchJob:
        """What the batch script is rendered from. run: the run directory."""
        job, path = self.plan.job, run.absolute()
        signal_seconds = self.settings.signal_seconds
        return BatchJob(
            name=job.name or run.name,
            run=path,
            nodes=job.cluster.nodes,
            gpus=self.request.gpus,
            cpus=self.cpus,
            command=launch_command(path),
            signal_seconds=signal_seconds or default_signal_seconds(self.save_need, self.limit),
            settings=self.settings,
        )


def launch_command(run: Path) -> list[str]:
    """What a batch script runs: this Python, which all nodes must have at the same path."""
    launch = ["mpctl", "launch", "--resume", "--run-dir", str(run), "--on", "slurm"]
    return [sys.executable, "-P", "-m", *launch]
