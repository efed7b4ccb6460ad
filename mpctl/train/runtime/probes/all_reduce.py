"""One rank of a timed all-reduce: `python -m mpctl.train.runtime.probes.all_reduce DEVICE` with torch's
RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.

Rank 0 prints its timings as one line of JSON. Sizes and bus rates are those of nccl-tests, and
calls are checked and timed as `mpctl bench collectives` does (collectives.py).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from datetime import timedelta
from typing import TypedDict

from mpctl.train.runtime.process import die_with_parent

if __name__ == "__main__":  # before the slow imports below
    die_with_parent(int(os.environ.get("MPCTL_PARENT", os.getppid())))

import torch
import torch.distributed as dist

from mpctl.core.collectives import bus_factor
from mpctl.records.rundir.requests import CollectiveCase
from mpctl.train.runtime.probes.collectives import TimedCollective
from mpctl.train.runtime.process_group import BACKENDS
from mpctl.train.runtime.store import environment_store
from mpctl.train.transport.group import Group

SIZES = (4 << 10, 1 << 20, 16 << 20)
REPEATS, WARM_UP = 5, 2
PATIENCE = timedelta(seconds=30)


class TimingEntry(TypedDict):
    """An all-reduce of `size` bytes: its median time in seconds, its bus rate in bytes/s."""

    size: int
    seconds: float
    bus_rate: float


def time_all_reduces(device: torch.device) -> list[TimingEntry]:
    """Time the all-reduce of float32 buffers of each size over the default group. Raises
    RuntimeError where a sum is wrong."""
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, "world")
    return [_timing(group, size, device) for size in SIZES]


def _timing(group: Group, size: int, device: torch.device) -> TimingEntry:
    case: CollectiveCase = {
        "kind": "all_reduce",
        "axis": group.name,
        "transport": "gloo" if device.type == "cpu" else "nccl",
        "dtype": "float32",
        "op": "sum",
        "bytes": size,
        "count": size // 4,
    }
    timed = TimedCollective.of(case, group, device)
    if wrong := timed.wrong():
        raise RuntimeError(f"{wrong} of {case['count']} sums over {group.size} ranks are wrong")
    times = [
        timed.seconds(warm_up=warm_up, iterations=1, begin=dist.barrier) for warm_up in (WARM_UP, *[0] * (REPEATS - 1))
    ]
    seconds = statistics.median(times)
    rate = bus_factor("all_reduce", group.size) * size / seconds
    return {"size": size, "seconds": seconds, "bus_rate": rate}


def main() -> None:
    """Meet the other ranks, time, print what rank 0 measured."""
    kind = sys.argv[1]
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(kind)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = environment_store(rank, PATIENCE)
    dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=size, timeout=PATIENCE)
    timings = time_all_reduces(device)
    if dist.get_rank() == 0:
        print(json.dumps(timings), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
