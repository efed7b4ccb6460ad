"""How long a launch takes to its first step, and a failed run to train again:
`python -m benchmarks.launch_overhead [ROUNDS] [RANKS]`. A benchmark, not a test.

    script   bare torchrun and a minimal script: gloo, one linear layer, one reduced gradient
    worker   bare torchrun and mpctl's own worker on a run directory that is ready
    launch   `mpctl launch` of the same job: job and data read, layout planned, everything checked,
             the directory written, torchrun and workers started, watched and summed up

Seconds from the start of the command until rank 0 has finished its first step. The three take turns
in every round; medians. CPU is of all processes of a command, to its end: it distinguishes a slower
program from a busier machine.

Then, ROUNDS times: a rank of a run with `launch.max_restarts` 1 is killed (kill -9). `report` is
the time to the line that names it; `again`, to the first step that the next attempt finishes.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mpctl.launch.supervise import POLL_SECONDS
from tests.launch.command import arguments, launch, wait_for
from tests.runtime.tiny import make_data

SCRIPT = """
import sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(32, 32)
model(torch.ones(8, 32)).sum().backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as stream:
        stream.write(repr(time.time()))
dist.destroy_process_group()
"""
SETTINGS = ("training.steps=2", "checkpoint.interval=0", "training.eval_samples=0",
            "checkpoint.at_end=false")  # fmt: skip
GOAL, REPORT_GOAL, AGAIN_GOAL = 0.3, 2.0, 5.0


@dataclass(frozen=True)
class Measured:
    """Seconds to the first step and to the end; CPU seconds of all processes."""

    first: float
    end: float
    cpu: float


@dataclass(frozen=True)
class Contenders:
    """The three commands, in a scratch folder that has prepared data."""

    folder: Path
    ranks: int

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def layout(self) -> tuple[str, ...]:
        return ("--tp", str(self.ranks)) if self.ranks <= 4 else ("--dp", str(self.ranks))

    def script(self) -> Measured:
        path, out = self.folder / "minimal.py", self.folder / "first"
        path.write_text(SCRIPT)
        return timed([*self.torchrun(), str(path), str(out)], lambda: float(out.read_text()))

    def worker(self) -> Measured:
        """Run the worker on the directory of the last launch, without its records."""
        for name in ("metrics.jsonl", "ranks"):
            path = self.run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        command = [*self.torchrun(), "-m", "mpctl.runtime.worker", str(self.run)]
        return timed(command, lambda: first_record(self.run))

    def launch(self) -> Measured:
        shutil.rmtree(self.run, ignore_errors=True)
        sets = [part for setting in SETTINGS for part in ("--set", setting)]
        argv = arguments(self.folder / "data", self.run, *self.layout, *sets)
        return timed([sys.executable, "-m", "mpctl", *argv], lambda: first_record(self.run))

    def torchrun(self) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--node-rank=0",
                f"--nproc-per-node={self.ranks}", "--rdzv-backend=static", "--max-restarts=0",
                "--master-addr=127.0.0.1", "--master-port=29617"]  # fmt: skip

    def recovery(self) -> tuple[float, float]:
        """Seconds from kill -9 of the last rank to the report and to the next step."""
        shutil.rmtree(self.run, ignore_errors=True)
        sets = ("training.steps=100000", "checkpoint.interval=50", "launch.max_restarts=1",
                "checkpoint.keep_last=2", "training.eval_samples=0")  # fmt: skip
        run = launch(self.folder / "data", self.run, *self.layout,
                     *(part for setting in sets for part in ("--set", setting)))  # fmt: skip
        run.at_step(60)
        began = time.time()
        run.worker(self.ranks - 1).kill()
        wait_for(lambda: "starting again" in run.stderr)
        report = time.time() - began
        wait_for(lambda: any(record["time"] > began + POLL_SECONDS for record in run.records))
        again = min(r["time"] for r in run.records if r["time"] > began + POLL_SECONDS) - began
        run.process.terminate()
        run.ended()
        return report, again


def timed(command: list[str], first: Callable[[], float]) -> Measured:
    """Run a command to its end. first: reads when its first step was finished."""
    used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end, now = time.time() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Measured(first() - began, end, cpu)


def first_record(run: Path) -> float:
    """When the first step on record was finished, in seconds since 1970."""
    return float(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["time"])


def show(name: str, values: list[float], goal: float | None = None) -> None:
    against = "" if goal is None else f"  goal {goal:g} s"
    print(f"{name:<44} {median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f}){against}")


def main() -> None:
    rounds, ranks = (int(word) for word in (*sys.argv[1:], *("7", "2")[len(sys.argv) - 1 :]))
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load at the start "
          f"{os.getloadavg()[0]:.2f}; {ranks} ranks, medians of {rounds} rounds")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        contenders = Contenders(Path(folder), ranks)
        contenders.launch()  # once for the caches
        table: dict[str, list[Measured]] = {"launch": [], "worker": [], "script": []}
        for _ in range(rounds):
            for name, measured in table.items():
                measured.append(getattr(contenders, name)())
        for name, measured in table.items():
            show(f"{name}: to the first step", [one.first for one in measured])
            show(f"{name}: to the end", [one.end for one in measured])
            show(f"{name}: CPU of all processes", [one.cpu for one in measured])
        for peer in ("script", "worker"):
            pairs = zip(table["launch"], table[peer], strict=True)
            show(f"launch over {peer}, by round", [a.first - b.first for a, b in pairs], GOAL)
        times = [contenders.recovery() for _ in range(rounds)]
        show("kill -9 of a rank to the report", [report for report, _ in times], REPORT_GOAL)
        show("kill -9 of a rank to training again", [again for _, again in times], AGAIN_GOAL)
        print(f"load at the end {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
