"""Coordination of ranks that measure together: share values, begin at the same time, agree on
another round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.train.runtime.mesh import Mesh


def values_of_all(mesh: Mesh, *values: float) -> Tensor:
    """The values of all ranks, [ranks, values] in float64, on every rank."""
    own = torch.tensor([values], dtype=torch.float64, device=mesh.device)
    return mesh.world.all_gather(own, dim=0)


def agreed_rounds(mesh: Mesh, most: int, seconds: float | None) -> Iterator[int]:
    """The numbers of at most `most` rounds from 0 on, the same on all ranks. The first round always
    begins; a further one only if a round as long as the longest so far would end within `seconds`
    by rank 0's clock, None for no limit."""
    started, longest = time.monotonic(), 0.0
    for number in range(most):
        began = time.monotonic()
        if number and seconds is not None:
            has_time = began - started + longest <= seconds
            if not values_of_all(mesh, has_time)[0].item():
                return
        yield number
        longest = max(longest, time.monotonic() - began)


def begin_together(mesh: Mesh) -> None:
    """Return when all ranks have called this and their devices have done all work."""
    finish_work(mesh.device)
    if mesh.world.size > 1:
        dist.barrier()


def finish_work(device: torch.device) -> None:
    """Return when the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_runs(mesh: Mesh, runs: Sequence[Callable[[], object]], ranks: int | None = None) -> tuple[float, float]:
    """Seconds of one run on the slowest rank, and processor seconds on the average rank; ranks:
    only this many ranks run, the others wait."""
    begin_together(mesh)
    began, worked = time.perf_counter(), time.process_time()
    if ranks is None or mesh.rank < ranks:
        for run in runs:
            run()
        finish_work(mesh.device)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    begin_together(mesh)  # ranks that wait here sleep; in a gather they might spin
    every = values_of_all(mesh, seconds / len(runs), cpu / len(runs))[:ranks]
    return float(every[:, 0].amax()), float(every[:, 1].mean())
