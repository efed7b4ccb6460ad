"""One rank of a timed all-reduce: `python -m mpctl.runtime.collective_probe DEVICE` with torch's
RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.

Rank 0 prints its timings as one line of JSON. As in nccl-tests (doc/PERFORMANCE.md), the size is
that of the whole buffer and the bus rate is 2 (n - 1) / n times size over time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import TypedDict

from mpctl.runtime.process import die_with_parent

if __name__ == "__main__":  # before the imports below, which take seconds
    die_with_parent(int(os.environ.get("MPCTL_PARENT", os.getppid())))

import torch
import torch.distributed as dist

from mpctl.runtime.process_group import BACKENDS

SIZES = (4 << 10, 1 << 20, 16 << 20)
REPEATS, WARM_UP = 5, 2
PATIENCE = timedelta(seconds=30)


class TimingEntry(TypedDict):
    """An all-reduce of `size` bytes: its median time in seconds, its bus rate in bytes/s."""

    size: int
    seconds: float
    bus_rate: float


def time_all_reduces(device: torch.device) -> list[TimingEntry]:
    """Time the all-reduce of float32 buffers of each size over the default group."""
    return [_timing(torch.ones(size // 4, device=device), size) for size in SIZES]


def _timing(values: torch.Tensor, size: int) -> TimingEntry:
    times = [_seconds(values) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
    world_size, seconds = dist.get_world_size(), statistics.median(times)
    rate = 2 * (world_size - 1) / world_size * size / seconds
    return {"size": size, "seconds": seconds, "bus_rate": rate}


def _seconds(values: torch.Tensor) -> float:
    values.fill_(1.0)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(values)
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    seconds = time.perf_counter() - began
    if float(values[0]) != dist.get_world_size():
        raise RuntimeError(f"the sum of {dist.get_world_size()} ones came out as {values[0]}")
    return seconds


def main() -> None:
    """Meet the other ranks, time, print what rank 0 measured."""
    kind = sys.argv[1]
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(kind)
    dist.init_process_group(BACKENDS[kind], timeout=PATIENCE)
    timings = time_all_reduces(device)
    if dist.get_rank() == 0:
        print(json.dumps(timings), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
