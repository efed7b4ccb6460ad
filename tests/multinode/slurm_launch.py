"""`mpctl launch --on slurm` of a small job over two nodes of two ranks, and all its processes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.multinode.daemons import wait_until
from tests.multinode.placement import recorded_hosts
from tests.multinode.slurm import SlurmCluster
from tests.train.runtime.tiny import SETTINGS

MPCTL = [sys.executable, "-m", "mpctl"]
TP_DP, TP_PP = ("--tp", "2", "--dp", "2"), ("--tp", "2", "--pp", "2")
LONG = ("--set", "training.steps=100000", "--set", "checkpoint.interval=0")


def launch_arguments(data: Path, run: Path, *more: str, **settings: object) -> list[str]:
    """The command line of a job of two nodes with two ranks each; `name__key` is `name.key`."""
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    given = {
        **SETTINGS,
        "data.path": str(data),
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 2,
        "training.eval_samples": 0,
        **dotted,
    }
    sets = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    return [
        *MPCTL,
        "launch",
        *(part for one in sets for part in ("--set", one)),
        "--on",
        "slurm",
        "--run-dir",
        str(run),
        *more,
    ]


@dataclass
class SlurmRun:
    """A run on a Slurm of the tests, by its directory."""

    cluster: SlurmCluster
    path: Path
    job: str = ""
    salloc: subprocess.Popen[bytes] | None = None

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of the steps."""
        with suppress(OSError):
            lines = (self.path / "metrics.jsonl").read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [record["loss"] for record in self.records]

    @property
    def summary(self) -> dict[str, Any]:
        """How it ended."""
        document: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return document

    def output(self) -> str:
        """What the launcher printed, in an allocation or in a batch job."""
        logs = [self.path.with_suffix(".out"), *sorted(self.path.glob("logs/slurm-*.out"))]
        logs += sorted(self.path.glob("nodes/srun.log"))
        return "\n".join(log.read_text(errors="replace") for log in logs if log.exists())

    def at_step(self, step: int, seconds: float = 120) -> SlurmRun:
        """Wait until a step is on record."""
        wait_until(lambda: len(self.records) >= step, seconds, self.output)
        return self

    def ended(self, seconds: float = 150) -> int:
        """Wait until the launch in an allocation has ended; its exit code."""
        assert self.salloc is not None
        return self.salloc.wait(seconds)

    def finished(self, seconds: float = 150) -> SlurmRun:
        """Wait until the batch job has ended well."""
        states = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "GONE"}
        state = self.cluster.wait_for(self.job, states, seconds)
        assert state == "COMPLETED", f"{state}\n{self.output()}"
        return self

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """The processes of the run on one node, or on all: its directory is in the command line of
        the launcher, the agents, torchrun and the ranks."""
        chosen = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                is_ours = any(str(self.path) in word for word in process.cmdline())
                if is_ours and node in (None, process.environ().get("SLURMD_NODENAME")):
                    chosen.append(process)
        return chosen

    def find(self, module: str, node: str | None = None) -> list[psutil.Process]:
        """The processes that run a module: `mpctl.run.launch.node.agent`, `mpctl.train.runtime.worker`."""
        return [p for p in self.processes(node) if module in p.cmdline()]

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks that run now."""
        ranks = {}
        for process in self.find("mpctl.train.runtime.worker"):
            with suppress(psutil.Error, OSError, KeyError):  # torchrun has no rank
                ranks[int(process.environ()["RANK"])] = process
        return dict(sorted(ranks.items()))

    def hosts_of_ranks(self) -> dict[int, str]:
        """The node of each rank that runs now, as Slurm says in its environment."""
        return {rank: p.environ()["SLURMD_NODENAME"] for rank, p in self.ranks().items()}

    def recorded_hosts(self) -> dict[int, str]:
        """The node of each rank in RUN/nodes/hosts.json."""
        return recorded_hosts(self.path)

    def require_nothing_left(self, seconds: float = 20) -> None:
        """No process of the run runs any more, within so many seconds."""
        wait_until(lambda: not self.processes(), seconds, lambda: f"gone: {self.processes()}")


def allocated(cluster: SlurmCluster, command: list[str], run: Path, *, nodes: int = 2, **environment: str) -> SlurmRun:
    """Run a launch in an allocation of so many nodes. environment: set inside of it."""
    setting = [f"{name}={value}" for name, value in environment.items()]
    salloc = ["salloc", "-Q", f"-N{nodes}", "--ntasks-per-node=1", "env", *setting, *command]
    with run.with_suffix(".out").open("wb") as out:
        process = subprocess.Popen(salloc, env=cluster.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    return SlurmRun(cluster, run, salloc=process)


def submitted(cluster: SlurmCluster, command: list[str], run: Path) -> SlurmRun:
    """Submit a launch."""
    done = cluster.run([*command, "--submit", "--json"])
    assert done.returncode == 0, done.stderr
    return SlurmRun(cluster, run, job=json.loads(done.stdout)["job_id"])
