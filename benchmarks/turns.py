"""Time and memory of contenders that take their steps in turn, in the same processes.

In every round each contender takes one step (A B C A B C), so that disturbances on the machine
affect all alike. The first rounds warm up. Memory is measured for each alone, in fresh processes.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Step = Callable[[], Any]
Spent = dict[str, list[tuple[float, float]]]
"""Wall and CPU seconds of every round, by contender."""
MIB = 2**20


def in_turns(
    steps: Mapping[str, Step], rounds: int, *, warm: int = 2, models: Mapping[str, nn.Module] | None = None
) -> Spent:
    """The time of each step on this rank, which has one thread. warm: rounds before those that
    count; models: their gradients are dropped after a step, outside its time."""
    torch.set_num_threads(1)
    spent: Spent = {name: [] for name in steps}
    for turn in range(warm + rounds):
        for name, step in steps.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            seconds = time.perf_counter() - wall, time.process_time() - cpu
            if models is not None:
                models[name].zero_grad(set_to_none=True)
            if turn >= warm:
                spent[name].append(seconds)
    return spent


def medians(rounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Wall and CPU seconds of one rank."""
    wall, cpu = (median(column) for column in zip(*rounds, strict=True))
    return wall, cpu


def to_the_last_rank(ranks: Sequence[Spent], name: str) -> tuple[float, float]:
    """Wall time of a step that ends with its last rank, and the busier rank's CPU time."""
    rounds = zip(*(rank[name] for rank in ranks), strict=True)
    wall = median(max(wall for wall, _ in both) for both in rounds)
    return wall, max(medians(rank[name])[1] for rank in ranks)


def print_against(spent: Spent, first: str, peaks: Mapping[str, int] | None = None) -> None:
    """A line for each contender: its medians, its speed relative to `first`, and, if known,
    bytes."""
    width, base = max(map(len, spent)), medians(spent[first])
    head = f"{'wall ms':>8} {'cpu ms':>8} {f'{first} / wall':>13} {f'{first} / cpu':>12}"
    print(f"{'':{width}} {head}" + (f" {'MiB':>6}" if peaks else ""))
    for name, rounds in spent.items():
        wall, cpu = medians(rounds)
        row = f"{wall * 1e3:8.1f} {cpu * 1e3:8.1f} {base[0] / wall:13.2f} {base[1] / cpu:12.2f}"
        print(f"{name:{width}} {row}" + (f" {peaks[name] / MIB:6.0f}" if peaks else ""))


def growth(made: Callable[[], Step]) -> int:
    """Bytes by which the resident peak grew from before a step was made to after three of it."""
    torch.set_num_threads(1)
    warm = torch.ones(8, 8, requires_grad=True)
    (warm @ warm).sum().backward()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = made()
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
