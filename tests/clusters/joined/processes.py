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

from tests.clusters.joined.worlds import Environment
from tests.launch.command import PATIENCE, wait_for


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
                    [sys.executable, "-m", "mpctl", *argv], stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output, start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                )  # fmt: skip
            self.processes.append(process)
        return self

    def ended(self, seconds: float = PATIENCE) -> list[int]:
        """The exit codes of all processes, once they have ended."""
        return [process.wait(seconds) for process in self.processes]

    def output(self, number: int = 0) -> str:
        return (self.folder / f"{number}.txt").read_text()

    def at_step(self, step: int) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        wait_for(lambda: (metrics.exists() and len(metrics.read_text().splitlines()) >= step)
                 or self.processes[0].poll() is not None)  # fmt: skip
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
                if "mpctl.runtime.worker" in command and "mpctl.runtime.torchrun" not in command:
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
