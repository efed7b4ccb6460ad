"""`mpctl launch --on ssh` of a small job over two hosts of two ranks, and all its processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.multinode.placement import recorded_hosts
from tests.multinode.ssh_hosts import SshHosts
from tests.run.launch.command import Launched, start, wait_for
from tests.train.runtime.tiny import SETTINGS

ENDLESS = ("--set", "training.steps=100000", "--set", "checkpoint.interval=0")


def ssh_arguments(hosts: SshHosts, hostfile: Path, data: Path, run_dir: Path) -> list[str]:
    """The command line of a job of two nodes with two ranks each; a layout is to follow."""
    settings = {
        **SETTINGS,
        "data.path": str(data),
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 2,
        "training.eval_samples": 0,
        "launch.ssh.config": str(hosts.config),
        "launch.timeout_seconds": 30,
    }
    sets = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return [
        "launch",
        *(part for one in sets for part in ("--set", one)),
        "--on",
        "ssh",
        "--hostfile",
        str(hostfile),
        "--run-dir",
        str(run_dir),
    ]


def ssh_launch(hosts: SshHosts, data: Path, run_dir: Path, *more: str) -> SshRun:
    """Start such a job on n1 and n2, in this order."""
    hostfile = hosts.hostfile("n1 slots=2", "n2 slots=2")
    return SshRun(start([*ssh_arguments(hosts, hostfile, data, run_dir), *more], run_dir))


class SshRun:
    """A launch over ssh. Its processes are found by the path of its run directory, which is in the
    command line of each; so those of all hosts are."""

    def __init__(self, launched: Launched) -> None:
        self.launched, self.run_dir = launched, launched.run_dir

    def at_step(self, step: int) -> SshRun:
        """Wait until a step is on record."""
        self.launched.at_step(step)
        return self

    def ended(self) -> SshRun:
        """Wait until the launcher has ended."""
        self.launched.ended()
        return self

    @property
    def code(self) -> int:
        """The launcher's exit code."""
        return int(self.launched.process.returncode)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The processes of the run that still run, by kind."""
        return processes_of(self.run_dir)

    def on_host(self, kind: str, host: str) -> psutil.Process:
        """The first process of a kind that runs on a host, as its environment says."""
        return next(p for p in self.processes()[kind] if p.environ()["MPCTL_TEST_HOST"] == host)

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        return next(p for p in self.processes()["rank"] if p.environ()["RANK"] == str(rank))

    def require_nothing_left(self, seconds: float) -> None:
        """No process of the run is anywhere any more, within so many seconds."""
        wait_for(lambda: not self.processes(), seconds)

    def hosts_of_ranks(self) -> dict[int, str]:
        """The host of each rank while it runs: as the sshd set it in the login's environment."""
        ranks = self.processes().get("rank", [])
        return {int(p.environ()["RANK"]): p.environ()["MPCTL_TEST_HOST"] for p in ranks}

    def recorded_hosts(self) -> dict[int, str]:
        """The host of each rank in RUN/nodes/hosts.json."""
        return recorded_hosts(self.run_dir)


def processes_of(run_dir: Path) -> dict[str, list[psutil.Process]]:
    """The processes that have a run directory in their command line, by kind: `launcher`, `ssh`,
    `agent`, `torchrun`, `waiting` for the next attempt, `rank`, and `other` for a shell between."""
    kinds: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if any(str(run_dir) in word for word in line):
                kinds.setdefault(_kind(line), []).append(process)
    return kinds


def _kind(line: list[str]) -> str:
    rules: list[tuple[str, Callable[[], bool]]] = [
        ("ssh", lambda: Path(line[0]).name == "ssh"),
        ("launcher", lambda: "launch" in line),
        ("agent", lambda: "mpctl.run.launch.node.agent" in line),
        ("waiting", lambda: "--waiting" in line),
        ("torchrun", lambda: "mpctl.train.runtime.torchrun" in line),
        ("rank", lambda: "mpctl.train.runtime.worker" in line),
    ]
    return next((kind for kind, applies in rules if applies()), "other")


def kill(process: psutil.Process, number: int = signal.SIGKILL) -> None:
    """Send a process a signal, SIGKILL unless another is named."""
    process.send_signal(number)
