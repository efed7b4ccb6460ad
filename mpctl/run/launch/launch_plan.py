"""JobSpec -> LaunchPlan: the exact command, environment and files, computed without side effects.

`mpctl launch --dry-run` prints it, the supervisor runs it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.plan.planning.document import plan_document
from mpctl.plan.planning.plan import Plan
from mpctl.records.checkpoint.folder import newest_checkpoint
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import LauncherRecord, this_launcher
from mpctl.records.rundir.requests import BenchRequest
from mpctl.run.hosts.machine import Machine
from mpctl.run.hosts.network import HOST
from mpctl.run.launch.node.torchrun import (
    NodeStart,
    one_host_environment,
    rank_environment,
    recorder_variables,
    torchrun_command,
)
from mpctl.run.launch.preflight import chosen_device
from mpctl.spec.job import JobSpec
from mpctl.spec.paths import absolute
from mpctl.spec.presets import lasting_name


@dataclass(frozen=True)
class HostCommand:
    """A command that is run on a host of a launch. node: the host's index in the plan; env: added
    to the environment."""

    node: int
    host: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Environment and command as a shell takes them."""
        env = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        return " \\\n  ".join([*env, shlex.join(self.command)])


class LaunchDocument(TypedDict):
    """Output of `mpctl launch --dry-run --json`. command, env: of the first host; hosts: of every host; job: the job
    with all defaults filled in."""

    schema: Literal["mpctl.launch/1"]
    command: list[str]
    env: dict[str, str]
    hosts: list[dict[str, Any]]
    run_dir: str
    world_size: int
    job: dict[str, Any]


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that can start. env: added to the environment of this process; files: to be written into the run
    directory, text by name; damaged: checkpoints to be renamed before the start; launcher: this process and the hosts
    of the ranks; request: measurement by the ranks (probe.py), None if they train."""

    job: JobSpec
    run: RunDir
    world_size: int
    env: dict[str, str]
    files: dict[str, str]
    warnings: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()
    launcher: LauncherRecord = field(default_factory=lambda: this_launcher("local"))
    request: BenchRequest | None = None

    def node_start(self, node: int, nnodes: int, ranks: int, address: str, port: int) -> NodeStart:
        """The arguments of torchrun on a host; ranks: of each host."""
        launch = self.job.launch
        is_repeated = self.request is None and bool(launch.max_restarts or launch.elastic)
        start = NodeStart(node, nnodes, ranks, address, port, self.env, launch.warm_start, is_repeated)
        if not self.runs_program:
            return start
        return replace(start, fork=False, module="program", stop_signal=launch.stop_signal)

    def local_start(self, port: int) -> NodeStart:
        """The arguments of torchrun when all ranks run on this host."""
        return replace(self.node_start(0, 1, self.world_size, HOST, port), env=self.local_env)

    @property
    def runs_program(self) -> bool:
        """Whether the ranks run `launch.program` instead of mpctl's own training."""
        return bool(self.job.launch.program) and self.request is None

    @property
    def local_env(self) -> dict[str, str]:
        """The environment of ranks that all run on this host."""
        return {**self.env, **one_host_environment(self.job)}

    def command(self, port: int) -> list[str]:
        """The command of one attempt on this host; each attempt takes a port that is free then."""
        return torchrun_command(self.run.path, self.local_start(port))

    def document(self, commands: Sequence[HostCommand]) -> LaunchDocument:
        """The plan as JSON; commands: what is run on each host, in order of nodes."""
        hosts = [{**asdict(command), "command": list(command.command)} for command in commands]
        return {
            "schema": "mpctl.launch/1",
            "command": hosts[0]["command"],
            "env": hosts[0]["env"],
            "hosts": hosts,
            "run_dir": str(self.run.path),
            "world_size": self.world_size,
            "job": self.job.model_dump(mode="json"),
        }


def plan_launch(
    plan: Plan,
    run: RunDir,
    machine: Machine,
    *,
    hosts: int = 1,
    warnings: tuple[str, ...] = (),
    damaged: tuple[Path, ...] = (),
    is_submitted: bool = False,
) -> LaunchPlan:
    """The launch of a legal plan on so many hosts like this machine. is_submitted: the hosts are
    not known yet, so that device and threads stay as in the job. Raises InputError when the plan is
    not legal."""
    job = resolved_job(plan, machine, hosts=hosts)
    files: dict[str, str] = {}
    env: dict[str, str] = {}
    if job.launch.program:
        from mpctl.run.launch.program import program_words

        argv, files, env, variables = program_words(plan, run)
        launch = job.launch.model_copy(update={"program_argv": argv, "program_env": variables})
        job = job.model_copy(update={"launch": launch})
    if is_submitted:
        asked = {name: getattr(plan.job.launch, name) for name in ("device", "threads_per_rank")}
        launch = job.launch.model_copy(update={**asked, "on": "auto"})
        job = job.model_copy(update={"launch": launch})
    document = plan_document(plan, plan.require_legal(), kinds=None, ranks=False)
    files |= {"job.json": job.model_dump_json(indent=1) + "\n", "plan.json": json.dumps(document) + "\n"}
    env = {**rank_environment(job), **recorder_variables(run, os.environ), **env}
    return LaunchPlan(job, run, job.world_size, env, files, warnings, damaged)


def first_environment(plan: Plan, run: RunDir, machine: Machine) -> dict[str, str] | None:
    """The variables of ranks that will all run on this machine, before the plan was checked and
    apart from those of an attempt; None where ranks are not to be forked."""
    job = _with_device(plan.job, machine)
    if not job.launch.warm_start or job.launch.program:
        return None
    return {**one_host_environment(job), **recorder_variables(run, os.environ)}


def _with_device(job: JobSpec, machine: Machine, hosts: int = 1) -> JobSpec:
    """The job with device and threads filled in."""
    threads = job.launch.threads_per_rank or max(1, machine.cores * hosts // job.world_size)
    device = chosen_device(job, machine)
    launch = job.launch.model_copy(update={"device": device, "threads_per_rank": threads})
    return job.model_copy(update={"launch": launch})


def resolved_job(plan: Plan, machine: Machine, *, hosts: int = 1) -> JobSpec:
    """The job with device, threads and predicted step time filled in, and with absolute paths.
    machine: one of the `hosts` hosts that share the ranks evenly."""
    job = _with_device(plan.job, machine, hosts)
    launch = job.launch.model_copy(
        update={
            "predicted_step_seconds": plan.estimate.step_seconds if plan.estimate else None,
            "program_dir": absolute(job.launch.program_dir or ".") if job.launch.program else None,
            "ssh": job.launch.ssh.model_copy(
                update={"hostfile": absolute(job.launch.ssh.hostfile), "config": absolute(job.launch.ssh.config)}
            ),
        }
    )
    data = job.data.model_copy(
        update={
            "path": absolute(job.data.path),
            "tokenizer": absolute(job.data.tokenizer),
            "corpus": None if job.data.corpus is None else [absolute(source) for source in job.data.corpus],
            "validation": {name: absolute(path) for name, path in job.data.validation.items()},
            "chat": job.data.chat and job.data.chat.model_copy(update={"template": absolute(job.data.chat.template)}),
        }
    )
    initial = _pinned(job.training.init_from)
    runtime = lasting_name("runtimes", job.training.runtime)
    training = job.training.model_copy(update={"init_from": initial, "runtime": runtime})
    return job.model_copy(update={"launch": launch, "data": data, "training": training})


def _pinned(origin: str | None) -> str | None:
    """Return the path of the initial weights; in a run, its newest checkpoint now, since it may save others while the
    ranks start."""
    if origin is None or (Path(origin) / "config.json").is_file():
        return absolute(origin)
    newest = newest_checkpoint(Path(origin))
    return absolute(origin if newest is None else str(newest))
