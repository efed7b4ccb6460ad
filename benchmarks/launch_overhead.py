"""How long a launch takes to its first step, and a failed run to train again:
`python -m benchmarks.launch_overhead [ROUNDS] [RANKS]`. A benchmark, not a test.

    script   bare torchrun and a minimal script: gloo, one linear layer, one reduced gradient
    worker   bare torchrun and mpctl's own worker on a run directory that is ready
    launch   `mpctl launch` of the same job: job and data read, layout planned, everything checked,
             the directory written, torchrun and workers started, watched and summed up

    cold     the same launch with `launch.warm_start = false`: every rank is a new process

Seconds from the start of the command until rank 0 has finished its first step. They take turns in
every round; medians. CPU is of all processes of a command, to its end: it distinguishes a slower
program from a busier machine.

Then, ROUNDS times in turn, with and without warm start: a rank of a run with `launch.max_restarts`
1 is killed (kill -9), with warm start once the process for the next attempt waits. `report` is the
time to the line that names the rank; `again`, to the first step that the next attempt finishes,
with the processor time that its torchrun and ranks have used by then. Memory is proportional (PSS:
pages that processes share are divided among them), of ranks that train.

Printed as the tables of benchmarks/results/reliability.md.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from mpctl.run.launch.supervise import POLL_SECONDS
from tests.run.launch.command import arguments, launch, wait_for
from tests.train.runtime.tiny import make_data

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
SETTINGS = ("training.steps=2", "checkpoint.interval=0", "training.eval_samples=0", "checkpoint.at_end=false")
GOAL, REPORT_GOAL, AGAIN_GOAL = 0.3, 2.0, 2.0


@dataclass(frozen=True)
class Measured:
    """Seconds to the first step and to the end; CPU seconds of all processes."""

    first: float
    end: float
    cpu: float


@dataclass(frozen=True)
class Recovery:
    """Seconds from kill -9 of the last rank to the report and to the next step, and processor time
    of the new attempt until then. memory: MiB of the waiting process, if any, and of ranks 0 and
    1."""

    report: float
    again: float
    cpu: float
    memory: tuple[float, ...]


@dataclass(frozen=True)
class Contenders:
    """The four commands, in a scratch folder that has prepared data."""

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
        command = [*self.torchrun(), "-m", "mpctl.train.runtime.worker", str(self.run)]
        return timed(command, lambda: first_record(self.run))

    def launch(self, *more: str) -> Measured:
        shutil.rmtree(self.run, ignore_errors=True)
        sets = [part for setting in (*SETTINGS, *more) for part in ("--set", setting)]
        argv = arguments(self.folder / "data", self.run, *self.layout, *sets)
        return timed([sys.executable, "-m", "mpctl", *argv], lambda: first_record(self.run))

    def cold(self) -> Measured:
        return self.launch("launch.warm_start=false")

    def torchrun(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            "--node-rank=0",
            f"--nproc-per-node={self.ranks}",
            "--rdzv-backend=static",
            "--max-restarts=0",
            "--master-addr=127.0.0.1",
            "--master-port=29617",
        ]

    def recovery(self, *, warm: bool) -> Recovery:
        shutil.rmtree(self.run, ignore_errors=True)
        sets = (
            "training.steps=100000",
            "checkpoint.interval=50",
            "launch.max_restarts=1",
            "checkpoint.keep_last=2",
            "training.eval_samples=0",
            f"launch.warm_start={str(warm).lower()}",
        )
        run = launch(
            self.folder / "data", self.run, *self.layout, *(part for setting in sets for part in ("--set", setting))
        )
        run.at_step(60)
        spares = wait_for(lambda: waiting(run.process.pid)) if warm else []
        for spare in spares:
            wait_for(lambda spare=spare: has_imported(spare))
        before = sum(map(cpu_seconds, spares))
        memory = [proportional_mib(p) for p in (*spares, run.worker(0), run.worker(1))]
        began = time.time()
        run.worker(self.ranks - 1).kill()
        wait_for(lambda: "starting again" in run.stderr)
        report = time.time() - began
        wait_for(lambda: any(record["time"] > began + POLL_SECONDS for record in run.records))
        again = min(r["time"] for r in run.records if r["time"] > began + POLL_SECONDS) - began
        family = psutil.Process(run.process.pid).children(recursive=True)
        cpu = sum(cpu_seconds(p) for p in family if "--waiting" not in p.cmdline()) - before
        run.process.terminate()
        run.ended()
        return Recovery(report, again, cpu, tuple(memory))


def waiting(launcher: int) -> list[psutil.Process]:
    """The processes of a launch that wait for an attempt."""
    return [p for p in psutil.Process(launcher).children() if "--waiting" in p.cmdline()]


def has_imported(process: psutil.Process) -> bool:
    """Whether a process uses no processor for a while, after it has used some."""
    before = cpu_seconds(process)
    time.sleep(1.0)
    return 0.5 < cpu_seconds(process) == before


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def proportional_mib(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss) / 2**20


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


def spread(values: Iterable[float]) -> str:
    """`3.09 (2.71 to 3.19)`: median, least and most."""
    found = list(values)
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


NAMES = {
    "script": "bare torchrun, minimal script",
    "worker": "bare torchrun, mpctl's worker",
    "cold": "`mpctl launch`, `launch.warm_start = false`",
    "launch": "`mpctl launch`",
}


def main() -> None:
    rounds, ranks = (int(word) for word in (*sys.argv[1:], *("7", "2")[len(sys.argv) - 1 :]))
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, load at the start "
        f"{os.getloadavg()[0]:.2f}; {ranks} ranks, medians of {rounds} rounds\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        contenders = Contenders(Path(folder), ranks)
        contenders.launch()  # once for the caches
        table: dict[str, list[Measured]] = {name: [] for name in NAMES}
        recoveries: dict[bool, list[Recovery]] = {False: [], True: []}
        for _ in range(rounds):
            for name, measured in table.items():
                measured.append(getattr(contenders, name)())
        for _ in range(rounds):
            for warm, recovered in recoveries.items():
                recovered.append(contenders.recovery(warm=warm))
    row("", "to the first step (s)", "processor time of all processes, to the end (s)")
    row("---", "--:", "--:")
    for name, words in NAMES.items():
        row(words, spread(m.first for m in table[name]), spread(m.cpu for m in table[name]))
    for peer in ("script", "worker", "cold"):
        over = [a.first - b.first for a, b in zip(table["launch"], table[peer], strict=True)]
        print(
            f"\nlaunch over {peer}, by round: {spread(over)} s to the first step{f'; goal {GOAL:g}' * (peer != 'cold')}"
        )
    print()
    row("a rank, kill -9", "reported (s)", "training again (s)", "processor time until then (s)")
    row("---", "--:", "--:", "--:")
    for warm, words in ((False, "`launch.warm_start = false`"), (True, "forked")):
        found = recoveries[warm]
        row(words, spread(r.report for r in found), spread(r.again for r in found), spread(r.cpu for r in found))
    print(f"\ngoals: reported {REPORT_GOAL:g} s, training again {AGAIN_GOAL:g} s\n")
    row("memory (MiB)", "the waiting process", "rank 0", "rank 1")
    row("---", "--:", "--:", "--:")
    for warm, words in ((False, "`launch.warm_start = false`"), (True, "forked")):
        columns = [spread(column) for column in zip(*(r.memory for r in recoveries[warm]), strict=True)]
        row(words, *(["none"] * (not warm)), *columns)
    print(f"\nload at the end {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
