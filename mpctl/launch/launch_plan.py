"""JobSpec -> LaunchPlan: the exact command, environment and files, computed without side effects.

`mpctl launch --dry-run` prints it, the supervisor runs it.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from mpctl.launch.node.machine import Machine
from mpctl.launch.node.torchrun import rank_environment, torchrun_command
from mpctl.launch.preflight import chosen_device
from mpctl.planning.document import plan_document
from mpctl.planning.plan import Plan
from mpctl.rundir.checkpoints import newest_checkpoint
from mpctl.rundir.directory import RunDir
from mpctl.spec.job import JobSpec
from mpctl.spec.paths import absolute

TRACE_ENTRIES = "2000"
"""Collectives that NCCL's flight recorder keeps for the record of a time-out."""


class LaunchDocument(TypedDict):
    """What `mpctl launch --dry-run --json` prints. job: the job with all defaults filled in."""

    schema: Literal["mpctl.launch/1"]
    command: list[str]
    env: dict[str, str]
    run_dir: str
    world_size: int
    job: dict[str, Any]


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that can start. env: added to the environment of this process; files: to be written
    into the run directory, text by name; damaged: checkpoints to be renamed before the start."""

    job: JobSpec
    run: RunDir
    world_size: int
    env: dict[str, str]
    files: dict[str, str]
    warnings: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()

    def command(self, port: int) -> list[str]:
        """The command of one attempt; each attempt takes a port that is free then."""
        return torchrun_command(self.run.path, self.world_size, port)

    def text(self, port: int) -> str:
        """Environment and command as one line for a shell."""
        env = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        return " \\\n  ".join([*env, shlex.join(self.command(port))])

    def document(self, port: int) -> LaunchDocument:
        """The plan as JSON."""
        return {
            "schema": "mpctl.launch/1",
            "command": self.command(port),
            "env": self.env,
            "run_dir": str(self.run.path),
            "world_size": self.world_size,
            "job": self.job.model_dump(mode="json"),
        }


def plan_launch(
    plan: Plan,
    run: RunDir,
    machine: Machine,
    *,
    warnings: tuple[str, ...] = (),
    damaged: tuple[Path, ...] = (),
) -> LaunchPlan:
    """The launch of a legal plan on this machine. Raises InputError when the plan is not legal."""
    job = resolved_job(plan, machine)
    document = plan_document(plan, plan.require_legal(), kinds=None, ranks=False)
    files = {
        "job.json": job.model_dump_json(indent=1) + "\n",
        "plan.json": json.dumps(document) + "\n",
    }
    env = {**rank_environment(job), "TORCH_FR_BUFFER_SIZE": TRACE_ENTRIES}
    return LaunchPlan(job, run, job.world_size, env, files, warnings, damaged)


def resolved_job(plan: Plan, machine: Machine) -> JobSpec:
    """The job with device, threads and predicted step time filled in, and with absolute paths."""
    job = plan.job
    launch = job.launch.model_copy(
        update={
            "device": chosen_device(job, machine),
            "threads_per_rank": job.launch.threads_per_rank
            or max(1, machine.cores // job.world_size),
            "predicted_step_seconds": plan.estimate.step_seconds if plan.estimate else None,
        }
    )
    data = job.data.model_copy(
        update={
            "path": absolute(job.data.path),
            "tokenizer": absolute(job.data.tokenizer),
            "corpus": None
            if job.data.corpus is None
            else [absolute(source) for source in job.data.corpus],
            "validation": {name: absolute(path) for name, path in job.data.validation.items()},
        }
    )
    initial = _pinned(job.training.init_from)
    training = job.training.model_copy(update={"init_from": initial})
    return job.model_copy(update={"launch": launch, "data": data, "training": training})


def _pinned(origin: str | None) -> str | None:
    """For initial weights from a run: its newest checkpoint at this moment, since the run may save
    others while the ranks start."""
    if origin is None or (Path(origin) / "config.json").is_file():
        return absolute(origin)
    newest = newest_checkpoint(Path(origin))
    return absolute(origin if newest is None else str(newest))
