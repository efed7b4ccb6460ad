"""How fast `mpctl plan` and `mpctl search` are: `python -m benchmarks.plan_speed [RUNS] [--write]`.
A benchmark, not a test.

Whole processes: medians of interleaved runs (A B C A B C), wall and processor time, and how many
times the processor time of a peer in the same rounds: a program that imports typer, rich.table and
pydantic and does nothing else. In-process figures are medians of seven. It prints one table and the
machine it ran on; --write puts both into benchmarks/results/planning.md. tests/test_benchmarks.py
fails when the table there is of other commands or goals, or of an earlier version of mpctl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.measured import write_part
from mpctl import __version__
from mpctl.core.axes import GROUP_KINDS
from mpctl.core.topology import Topology
from mpctl.core.units import seconds_text
from mpctl.plan.batch.answers import answers

RUNS = Path(__file__).parents[1] / "tests" / "recorded" / "published_runs.json"
PAGE, PART = Path(__file__).parent / "results" / "planning.md", "speed of planning"
MPCTL = [str(Path(sys.executable).with_name("mpctl"))]
PEER = "import typer, rich.table, pydantic (peer)"
GOLDEN = [*MPCTL, "plan", "--nodes", "2", "--gpus-per-node", "8", "--tp", "2", "--pp", "4"]
MILLION = [
    *MPCTL,
    "plan",
    "--nodes",
    "131072",
    "--gpus-per-node",
    "8",
    "--tp",
    "8",
    "--pp",
    "16",
    "--groups",
    "none",
    "--json",
]
H100 = [*MPCTL, "search", "--cluster", "dgx-h100", "--json"]
LARGE = [*MPCTL, "search", "gpt3-175b-1024", "--nodes", "512", "--dtype", "bf16", "--json"]
CORE = ["--runtime", "megatron-core"]
SEARCH_ROUNDS, RUNS_OF_PLANS = 3, 15
COLUMNS = ("process", "processor time", "of the peer's", "goal")


class Command(NamedTuple):
    """arguments: of the process; goal: the most processor time, in multiples of the peer's."""

    arguments: Sequence[str]
    goal: float | None = None


class Used(NamedTuple):
    """Seconds of a process."""

    wall: float
    cpu: float


QUICK = {
    PEER: Command([sys.executable, "-c", "import typer, rich.table, pydantic"]),
    "mpctl plan, 16 GPUs, tables": Command(GOLDEN, 1.75),
    "mpctl plan, 16 GPUs, --json": Command([*GOLDEN, "--json"]),
    "mpctl plan two-nodes-16-gpus (with model)": Command([*MPCTL, "plan", "two-nodes-16-gpus"]),
    "mpctl plan, 1,048,576 ranks, --groups none --json": Command(MILLION),
}
SEARCHES = {
    PEER: QUICK[PEER],
    "search Llama 3 70B, 256 H100, megatron-core": Command(
        [*H100, "--nodes", "32", "--model", "llama-3-70b", "--global-batch-size", "1024", *CORE]
    ),
    "search Llama 3 70B, 256 H100, mpctl": Command(
        [*H100, "--nodes", "32", "--model", "llama-3-70b", "--global-batch-size", "1024"], 30
    ),
    "search Llama 3 405B, 8,192 H100, mpctl": Command(
        [*H100, "--nodes", "1024", "--model", "llama-3-405b", "--global-batch-size", "2048"], 100
    ),
    "search GPT-3 175B, 4,096 A100, megatron-core": Command([*LARGE, *CORE], 20),
    "search GPT-3 175B, 4,096 A100, mpctl": Command([*LARGE, "--runtime", "mpctl"], 25),
}


def interleaved(commands: Mapping[str, Command], rounds: int) -> dict[str, list[Used]]:
    """The time of every command, in turns, after one round to warm up."""
    used: dict[str, list[Used]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            before, began = _children(), time.perf_counter()
            subprocess.run(command.arguments, check=True, stdout=subprocess.DEVNULL)
            if turn:
                used[name].append(Used(time.perf_counter() - began, _children() - before))
    return used


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def show_processes(commands: Mapping[str, Command], rounds: int) -> list[tuple[str, ...]]:
    """Print a line for each command, milliseconds wall and processor, and times the peer's
    processor time; returns the rows of the page."""
    used, rows = interleaved(commands, rounds), list[tuple[str, ...]]()
    peer = median(one.cpu for one in used[PEER])
    for name, runs in used.items():
        walls, cpu = [1e3 * one.wall for one in runs], median(one.cpu for one in runs)
        spread = f"({min(walls):.0f} to {max(walls):.0f})"
        print(
            f"{name:<52} {median(walls):8.0f} ms {spread:<16} {1e3 * cpu:8.0f} ms "
            f"{cpu / peer:6.2f}  {goal_of(commands[name])}".rstrip()
        )
        rows.append((name, seconds_text(cpu), f"{cpu / peer:.3g}", goal_of(commands[name])))
    return rows


def goal_of(command: Command) -> str:
    """The cell of a command's goal."""
    return f"{command.goal:g}" if command.goal else ""


def page_part(rows: Iterable[Sequence[str]], *, rounds: int, load: float) -> str:
    """What benchmarks/results/planning.md says: version, machine and load, then a row for each command."""
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}"
    head = (
        f"{datetime.now(UTC):%Y-%m-%d}, mpctl {__version__}, {machine} at the start, "
        f"`python -m benchmarks.plan_speed {rounds} --write`:"
    )
    lines = [f"| {' | '.join(row)} |" for row in (COLUMNS, *rows)]
    lines.insert(1, "|---|--:|--:|--:|")
    return "\n".join((head, "", *lines))


def in_process(work: Callable[[], object], runs: int = 7, inner: int = 1) -> list[float]:
    """Seconds of one piece of work, by run."""
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        for _ in range(inner):
            work()
        seconds.append((time.perf_counter() - began) / inner)
    return seconds


def show(name: str, seconds: list[float], unit: float, word: str) -> None:
    low, mid, high = (f(seconds) / unit for f in (min, median, max))
    print(f"{name:<52} {mid:8.1f} {word}  ({low:.1f} to {high:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description="the speed of mpctl plan and mpctl search")
    parser.add_argument("runs", nargs="?", type=int, default=RUNS_OF_PLANS, help="of each plan")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    python, load = platform.python_version(), os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, Python {python}, load {load:.2f}")
    print(f"medians of {options.runs} runs, searches of {SEARCH_ROUNDS}: wall, processor, times the peer's")
    rows = show_processes(QUICK, options.runs)
    rows += show_processes(SEARCHES, SEARCH_ROUNDS)[1:]
    if options.write:
        write_part(PART, page_part(rows, rounds=options.runs, load=load), PAGE)
    world = Topology.of({"tp": 8, "pp": 16, "dp": 8192}, gpus_per_node=8)
    every = in_process(lambda: [world.kind_groups(kind) for kind in GROUP_KINDS])
    show("all seven kinds of groups of 1,048,576 ranks", every, 1e-3, "ms")
    one = in_process(lambda: [world.find_group(k, 777_777) for k in GROUP_KINDS], inner=1000)
    show("one rank's seven groups among them", one, 1e-6, "µs")
    rows = json.loads(RUNS.read_text("utf-8"))["rows"]
    lines = [json.dumps(row).encode() for row in rows]
    batch = in_process(lambda: list(answers(lines)), inner=3)
    each = [seconds / len(lines) for seconds in batch]
    show(f"plan --batch, a row of {len(lines)} published runs", each, 1e-3, "ms")


if __name__ == "__main__":
    main()
