"""JobSpec -> LaunchPlan: the exact command, environment and files, computed without side effects.

`--dry-run` prints it; the supervisor runs it. torchrun gets static rendezvous (exact ranks) and no
restarts of its own: restarted workers reuse the old attempt's store and hang (pytorch#135712), so
the supervisor starts a fresh torchrun for every attempt.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from mpctl.launch.machine import Machine
from mpctl.launch.port import HOST
from mpctl.launch.preflight import chosen_device
from mpctl.planning.document import plan_document
from mpctl.planning.plan import Plan
from mpctl.rundir.checkpoints import newest_checkpoint
from mpctl.rundir.directory import RunDir
from mpctl.spec.job import JobSpec
from mpctl.spec.paths import absolute

LAUNCHER = "MPCTL_LAUNCHER"  # environment of torchrun: the process that it ends with


@dataclass(frozen=True)
class LaunchPlan:
    """argv without a port: each attempt takes a free one, so that `command` names it. damaged:
    checkpoints that are to be renamed before the start, because they are not whole."""

    job: JobSpec
    run: RunDir
    world_size: int
    env: dict[str, str]
    files: dict[str, str]
    warnings: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()

    def command(self, port: int) -> list[str]:
        return [
            sys.executable, "-m", "mpctl.runtime.torchrun",
            "--nnodes=1", "--node-rank=0", f"--nproc-per-node={self.world_size}",
            "--rdzv-backend=static", f"--master-addr={HOST}", f"--master-port={port}",
            "--max-restarts=0", "-m", "mpctl.runtime.worker", str(self.run.path.resolve()),
        ]  # fmt: skip

    def text(self, port: int) -> str:
        """What would run, as a shell would take it."""
        env = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        return " \\\n  ".join([*env, shlex.join(self.command(port))])


def plan_launch(
    plan: Plan, run: RunDir, machine: Machine, *, warnings: tuple[str, ...] = (),
    damaged: tuple[Path, ...] = (),
) -> LaunchPlan:  # fmt: skip
    """The launch of a legal plan on this machine."""
    job = resolved_job(plan, machine)
    topology = plan.require_legal()
    document = plan_document(plan, topology, kinds=None, ranks=False)
    files = {
        "job.json": job.model_dump_json(indent=1) + "\n",
        "plan.json": json.dumps(document) + "\n",
    }
    env = {
        "OMP_NUM_THREADS": str(job.launch.threads_per_rank),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    if job.launch.device == "cpu":
        env["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        env["CUDA_VISIBLE_DEVICES"] = ""
    return LaunchPlan(job, run, job.world_size, env, files, warnings, damaged)


def resolved_job(plan: Plan, machine: Machine) -> JobSpec:
    """The job with its device, threads and prediction filled in, and its paths made absolute."""
    job = plan.job
    device = chosen_device(job, machine)
    threads = job.launch.threads_per_rank or max(1, machine.cores // job.world_size)
    predicted = plan.estimate.step_seconds if plan.estimate else None
    launch = job.launch.model_copy(
        update={
            "device": device,
            "threads_per_rank": threads,
            "predicted_step_seconds": predicted,
        }
    )
    held = job.data
    corpus = None if held.corpus is None else [absolute(source) for source in held.corpus]
    others = {name: absolute(path) for name, path in held.validation.items()}
    data = held.model_copy(update={
        "path": absolute(held.path), "tokenizer": absolute(held.tokenizer), "corpus": corpus,
        "validation": others,
    })  # fmt: skip
    initial = _pinned(job.training.init_from)
    training = job.training.model_copy(update={"init_from": initial})
    return job.model_copy(update={"launch": launch, "data": data, "training": training})


def _pinned(origin: str | None) -> str | None:
    """Of a run, its checkpoint of now: it may be saving others while our ranks start."""
    if origin is None or (Path(origin) / "config.json").is_file():
        return absolute(origin)
    newest = newest_checkpoint(Path(origin))
    return absolute(origin if newest is None else str(newest))
