"""How fast `mpctl plan` is: `python -m benchmarks.plan_speed [RUNS]`. A benchmark, not a test.

Whole-process figures are medians of interleaved runs (A B C A B C), next to a peer in the same
rounds: a program that imports typer and pydantic and does nothing else. In-process figures are
medians of seven, of searches of three. It prints one table and the machine it ran on.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from mpctl.axes import GROUP_KINDS
from mpctl.batch.answers import answers
from mpctl.search.find import find_layouts
from mpctl.search.space import SearchSpace
from mpctl.spec.load import load_job
from mpctl.topology import Topology

RUNS = Path(__file__).parents[1] / "tests" / "recorded" / "published_runs.json"
LARGE = {"cluster.nodes": 512, "parallel.dp": 32, "training.dtype": "bf16"}
MPCTL = [str(Path(sys.executable).with_name("mpctl"))]
PEER = [sys.executable, "-c", "import typer, pydantic"]
GOLDEN = [*MPCTL, "plan", "--nodes", "2", "--gpus-per-node", "8", "--tp", "2", "--pp", "4"]
MILLION = [*MPCTL, "plan", "--nodes", "131072", "--gpus-per-node", "8", "--tp", "8", "--pp", "16",
           "--groups", "none", "--json"]  # fmt: skip
COMMANDS = {
    "import typer, pydantic (peer)": (PEER, None),
    "mpctl plan, 16 GPUs, tables": (GOLDEN, 0.200),
    "mpctl plan, 16 GPUs, --json": ([*GOLDEN, "--json"], None),
    "mpctl plan two-nodes-16-gpus (with model)": ([*MPCTL, "plan", "two-nodes-16-gpus"], None),
    "mpctl plan, 1,048,576 ranks, --groups none --json": (MILLION, 0.300),
}


def whole_process(runs: int) -> dict[str, list[float]]:
    """Wall seconds of every command, interleaved, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(runs + 1):
        for name, (command, _) in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def in_process(work: Callable[[], object], runs: int = 7, inner: int = 1) -> list[float]:
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        for _ in range(inner):
            work()
        seconds.append((time.perf_counter() - began) / inner)
    return seconds


def show(name: str, seconds: list[float], goal: float | None, unit: float, word: str) -> None:
    low, mid, high = (f(seconds) / unit for f in (min, median, max))
    against = f"goal {goal / unit:.0f} {word}" if goal else ""
    print(f"{name:<52} {mid:8.1f} {word}  ({low:.1f} to {high:.1f})  {against}")


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    python, load = platform.python_version(), os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, Python {python}, load {load:.2f}; medians of {runs} runs")
    for name, seconds in whole_process(runs).items():
        show(name, seconds, COMMANDS[name][1], 1e-3, "ms")
    world = Topology.of({"tp": 8, "pp": 16, "dp": 8192}, gpus_per_node=8)
    every = in_process(lambda: [world.kind_groups(kind) for kind in GROUP_KINDS])
    show("all seven kinds of groups of 1,048,576 ranks", every, 0.5, 1e-3, "ms")
    one = in_process(lambda: [world.find_group(k, 777_777) for k in GROUP_KINDS], inner=1000)
    show("one rank's seven groups among them", one, None, 1e-6, "µs")
    rows = json.loads(RUNS.read_text("utf-8"))["rows"]
    lines = [json.dumps(row).encode() for row in rows]
    batch = in_process(lambda: list(answers(lines)), inner=3)
    each = [seconds / len(lines) for seconds in batch]
    show(f"plan --batch, a row of {len(lines)} published runs", each, 1 / 500, 1e-3, "ms")
    for runtime in ("megatron-core", "mpctl"):
        job = load_job("gpt3-175b-1024", {**LARGE, "training.runtime": runtime})
        found = in_process(lambda job=job: find_layouts(SearchSpace(job)), runs=3)
        show(f"search GPT-3 175B on 4,096 A100, all of {runtime}", found, 3.0, 1e-3, "ms")


if __name__ == "__main__":
    main()
