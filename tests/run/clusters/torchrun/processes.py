"""The processes of a world on this machine: `mpctl launch` once for each, as another program would
start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from mpctl.cli.app import run as mpctl
from tests.run.launch.command import PATIENCE, wait_for

Environment = dict[str, str]
Capture = pytest.CaptureFixture[str]


def said_by(environment: Environment, argv: Sequence[str], capfd: Capture) -> tuple[int, str]:
    """The exit code of `mpctl ARGV`, run by this process as one of a world, and its output."""
    capfd.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        code = mpctl(list(argv))
    shown = capfd.readouterr()
    return code, shown.out + shown.err


@dataclass
class World:
    """A started world: its processes in order, their outputs in files of `folder`."""

    folder: Path
    run_dir: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, argv: Sequence[str], environments: Sequence[Environment]) -> World:
        self.folder.mkdir(exist_ok=True)
        for number, environment in enumerate(environments):
            with (self.folder / f"{number}.txt").open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "mpctl", *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                )
            self.processes.append(process)
        return self

    def ended(self, seconds: float = PATIENCE) -> list[int]:
        """The exit codes of all processes, once they have ended."""
        return [process.wait(seconds) for process in self.processes]

    def output(self, number: int = 0) -> str:
        return (self.folder / f"{number}.txt").read_text()

    def at_step(self, step: int) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        wait_for(
            lambda: (
                (metrics.exists() and len(metrics.read_text().splitlines()) >= step)
                or self.processes[0].poll() is not None
            )
        )
        assert self.processes[0].poll() is None, self.output()

    def left(self) -> list[int]:
        """Processes with the run directory in their command line."""
        path = str(self.run_dir)
        alive = psutil.process_iter(["cmdline"])
        return [p.pid for p in alive if path in " ".join(p.info["cmdline"] or [])]

    def workers(self) -> dict[int, psutil.Process]:
        """The ranks' processes, by rank."""
        ranks = {}
        for pid in self.left():
            with suppress(psutil.Error):  # it ends at this moment
                process = psutil.Process(pid)
                command = process.cmdline()
                if "mpctl.train.runtime.worker" in command and "mpctl.train.runtime.torchrun" not in command:
                    ranks[int(process.environ()["RANK"])] = process
        return ranks

    def kill(self) -> None:
        """End everything that still runs."""
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in self.left():
            with suppress(psutil.Error):
                psutil.Process(pid).kill()


def torchrun_world(rank: int, nodes: int = 2, per_node: int = 4) -> Environment:
    """A rank of torchrun (torch 2.13), with its variables about the nodes."""
    return {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank % per_node}",
        "WORLD_SIZE": f"{nodes * per_node}",
        "LOCAL_WORLD_SIZE": f"{per_node}",
        "GROUP_RANK": f"{rank // per_node}",
        "GROUP_WORLD_SIZE": f"{nodes}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    }


def pod(node: int, nodes: int = 2, per_node: str = "4") -> Environment:
    """A pod of a TrainJob."""
    return {
        "PET_NNODES": f"{nodes}",
        "PET_NPROC_PER_NODE": per_node,
        "PET_NODE_RANK": f"{node}",
        "PET_MASTER_ADDR": "llama-node-0-0.llama",
        "PET_MASTER_PORT": "29500",
    }


def pytorch_pod(node: int, nodes: int = 2, per_node: str = "4") -> Environment:
    """A pod of a PyTorchJob, which also has RANK and WORLD_SIZE: of the node, and of all ranks."""
    size = int(per_node) * nodes if per_node.isdecimal() else nodes
    return {
        **pod(node, nodes, per_node),
        "RANK": f"{node}",
        "WORLD_SIZE": f"{size}",
        "MASTER_ADDR": "llama-master-0",
        "MASTER_PORT": "23456",
    }


def task(process: int, nodes: int = 2, per_node: int = 4, *, cyclic: bool = False) -> Environment:
    """A task of a Slurm step; cyclic: tasks are dealt to the nodes in turn. The job is larger."""
    node = process % nodes if cyclic else process // per_node
    local = process // nodes if cyclic else process % per_node
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "64",
        "SLURM_NNODES": "16",
        "SLURM_STEP_NUM_TASKS": f"{nodes * per_node}",
        "SLURM_STEP_NUM_NODES": f"{nodes}",
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_PROCID": f"{process}",
        "SLURM_LOCALID": f"{local}",
        "SLURM_NODEID": f"{node}",
    }


def mpi_process(process: int, nodes: int = 2, per_node: int = 4) -> Environment:
    """A process of mpirun (Open MPI)."""
    return {
        "OMPI_COMM_WORLD_RANK": f"{process}",
        "OMPI_COMM_WORLD_SIZE": f"{nodes * per_node}",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{process % per_node}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{per_node}",
    }
