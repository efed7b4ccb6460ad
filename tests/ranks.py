"""Run a function on n ranks: forkserver, torch and the runtime preloaded, gloo over a FileStore.

    def double(rank: int, size: int, x: Tensor) -> Tensor: ...        # at module level
    results = run_ranks(double, 4, torch.ones(3))                     # one result a rank

Each call starts fresh processes (0.2 s for two on 2 cores; spawn takes 10 to 22 s), so a failed or
hung test cannot poison the next. Results come back by torch.save and are read with
weights_only=True: tensors, numbers, strings and containers of them.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective

CONTEXT = mp.get_context("forkserver")
# What nearly every rank imports, torch._dynamo alone 1.2 s: ranks are forks of one that has.
CONTEXT.set_forkserver_preload(["torch._dynamo", "mpctl.train.runtime.build", "tests.ranks", "pytest"])


Join = Callable[[dist.Store, int, int, timedelta], None]


def join_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Make a default group of gloo."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def grouped(rank: int, size: int, log: list[Collective] | None = None, name: str = "tp") -> Group:
    """Of all ranks that a test started."""
    record = None if log is None else log.append
    return Group(rank, size, dist.group.WORLD if size > 1 else None, name, record)


def run_ranks(
    function: Callable[..., Any], n: int, *args: Any, timeout: float = 60, join: Join = join_gloo
) -> list[Any]:
    """`function(rank, size, *args)` on n ranks with a default group, which `join` makes; results by
    rank.

    Raises AssertionError with the traceback of the first rank that failed, or at the timeout.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        where = Path(folder)
        ranks = [
            CONTEXT.Process(target=_rank, args=(function, rank, n, args, folder, timeout, join)) for rank in range(n)
        ]
        for process in ranks:
            process.start()
        try:
            failed = _first_failure(ranks, where, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        if failed is not None:
            raise AssertionError(f"rank {failed} of {n}: {_story(where, failed)}")
        return [torch.load(where / f"{rank}.pt", weights_only=True) for rank in range(n)]


def run_each(calls: Mapping[str, tuple[Any, ...]], n: int, **how: Any) -> dict[str, list[Any]]:
    """`function(rank, size, *args)` of each call, one after the other on the same n ranks; results
    by the call's name, then by rank. Several statements about n ranks so share one start."""
    by_rank = run_ranks(_each, n, list(calls.values()), **how)
    by_call = zip(*by_rank, strict=True)
    return {name: list(results) for name, results in zip(calls, by_call, strict=True)}


def _each(rank: int, size: int, calls: list[tuple[Any, ...]]) -> list[Any]:
    return [function(rank, size, *args) for function, *args in calls]


def _first_failure(ranks: list[Any], where: Path, timeout: float) -> int | None:
    """Wait for all; the rank that ended badly first or, at the timeout, the first one still running."""
    deadline = time.monotonic() + timeout
    running = dict(enumerate(ranks))
    while running:
        wait([p.sentinel for p in running.values()], timeout=max(0, deadline - time.monotonic()))
        ended = [rank for rank, process in running.items() if not process.is_alive()]
        bad = [rank for rank in ended if running[rank].exitcode != 0]
        if bad or not ended:
            stories = {rank: where / f"{rank}.txt" for rank in bad}
            told = [rank for rank, file in stories.items() if file.exists()]
            return min(told or bad or running, key=lambda rank: (stories[rank].stat().st_mtime_ns if told else 0, rank))
        for rank in ended:
            del running[rank]
    return None


def _story(folder: Path, rank: int) -> str:
    file = folder / f"{rank}.txt"
    return file.read_text() if file.exists() else "no traceback: it hung or was killed"


def _rank(
    function: Callable[..., Any], rank: int, size: int, args: Any, folder: str, timeout: float, join: Join
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    where = Path(folder)
    try:
        store = dist.FileStore(str(where / "store"), size)
        join(store, rank, size, timedelta(seconds=timeout))
        torch.save(function(rank, size, *args), where / f"{rank}.pt")
        dist.barrier()
    except BaseException:
        (where / f"{rank}.txt").write_text("\n" + traceback.format_exc())
        os._exit(1)
    os._exit(0)
