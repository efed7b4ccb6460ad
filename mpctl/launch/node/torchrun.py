"""Starting the ranks of one attempt on this host: by torchrun for training, directly for tasks.

torchrun gets static rendezvous (exact ranks) and no restarts of its own: restarted workers reuse
the store of the old attempt and hang (pytorch#135712), so every attempt is a fresh torchrun. It
runs in a session of its own, so that Ctrl-C in the terminal reaches the launcher only. If the
launcher is killed, the kernel kills torchrun (runtime/torchrun.py), and with it the ranks.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpctl.launch.node.address import HOST, free_port
from mpctl.launch.node.processes import ProcessTree, kill_tree
from mpctl.rundir.directory import RunDir
from mpctl.rundir.marker import COMMAND
from mpctl.spec.job import JobSpec

LAUNCHER = "MPCTL_LAUNCHER"
"""Environment variable of torchrun: the process id of the launcher, with which it ends."""


def rank_environment(job: JobSpec) -> dict[str, str]:
    """The variables that every rank needs besides those of this process, and that the launcher of
    ranks does not set. The job's device and threads must be filled in."""
    environment = {
        "OMP_NUM_THREADS": str(job.launch.threads_per_rank),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
    }
    if job.launch.device == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def torchrun_command(run_dir: Path, world_size: int, port: int) -> list[str]:
    """The command that starts all ranks of a run."""
    return [
        sys.executable,
        "-m",
        "mpctl.runtime.torchrun",
        "--nnodes=1",
        "--node-rank=0",
        f"--nproc-per-node={world_size}",
        "--rdzv-backend=static",
        f"--master-addr={HOST}",
        f"--master-port={port}",
        "--max-restarts=0",
        "-m",
        "mpctl.runtime.worker",
        str(run_dir.resolve()),
    ]


def task_environments(job: JobSpec) -> Iterator[dict[str, str]]:
    """The environment of each rank of a task, in order of rank: with the variables that torchrun
    would set. Raises RunFailed when the ranks cannot meet on this host."""
    world_size = job.world_size
    common = {
        **rank_environment(job),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(free_port(world_size)),
    }
    for rank in range(world_size):
        yield {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}


@dataclass
class Attempt:
    """One torchrun and its ranks. address: where the ranks meet, `127.0.0.1:29500`."""

    torchrun: subprocess.Popen[bytes]
    processes: ProcessTree
    address: str

    @classmethod
    def start(cls, run: RunDir, world_size: int, env: Mapping[str, str]) -> Attempt:
        """Start torchrun, its output appended to logs/torchrun.log. env: added to the environment
        of this process. Raises RunFailed when the ranks cannot meet on this host."""
        port = free_port(world_size)
        command = torchrun_command(run.path, world_size, port)
        with run.torchrun_log.open("ab") as log:
            log.write(os.fsencode(f"{COMMAND}{shlex.join(command)}\n"))
            log.flush()
            torchrun = subprocess.Popen(
                command,
                env={**os.environ, **env, LAUNCHER: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # A worker reads it once it has started, about a second from now.
        run.torchrun_pid.write_text(str(torchrun.pid))
        return cls(torchrun, ProcessTree(torchrun.pid, world_size), f"{HOST}:{port}")

    def poll(self) -> int | None:
        """torchrun's exit code; None while it runs."""
        return self.torchrun.poll()

    def end(self) -> int:
        """Kill torchrun and all ranks that still run; torchrun's exit code."""
        kill_tree(self.torchrun)
        return self.torchrun.wait()
