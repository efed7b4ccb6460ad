"""Times kernels on the ranks of a mesh, in rounds of all cases, each by several numbers of ranks.

In a round the operands of a case are made, and each number of ranks n runs it once: ranks 0 to n-1
at the same time, while the others wait at a barrier. A first run of each copy of the operands warms
up; in round 0 another one says how often the kernel is repeated so that a timing takes
`least_seconds`.

By hand, least_seconds 20 ms and a kernel of 3 ms: 7 repeats, and the answer is a 7th of their time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from mpctl.rundir.requests import KernelRequest, KernelTiming
from mpctl.runtime.kernel_work import Work, kernel_work
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.rank_values import agreed_rounds, begin_together, finish_work, values_of_all
from mpctl.spec.job import JobSpec

MOST_REPEATS, TRIALS = 10_000, 3


def probe_kernels(request: KernelRequest, job: JobSpec, mesh: Mesh) -> Iterator[KernelTiming]:
    """The answers to a request, the same on every rank of `mesh`, which all call it. job: its model
    and training say what the shapes leave open (norm, activation, dropout)."""
    dropout = {name: request[name] for name in ("dropout", "attention_dropout")}
    job = job.model_copy(update={"training": job.training.model_copy(update=dropout)})
    repeats: dict[int, int] = {}
    for number in agreed_rounds(mesh, request["rounds"], request["seconds"]):
        for place, case in enumerate(request["cases"]):
            works = [kernel_work(case, job, mesh.device) for _ in range(case["copies"])]
            for work in works:
                work()
            if place not in repeats:
                repeats[place] = _repeats(works, request["least_seconds"], mesh)
            for ranks in request["ranks"]:
                seconds, cpu = _timed(works, repeats[place], ranks, mesh)
                yield {"event": "kernel", "round": number, "case": place, "ranks": ranks,
                       "seconds": seconds, "cpu_seconds": cpu,
                       "repeats": repeats[place]}  # fmt: skip


def _repeats(works: Sequence[Work], least: float, mesh: Mesh) -> int:
    """How often to run a kernel in a timing: the same number on all ranks. By the shortest of some
    runs, as one that the machine interrupted would ask for too few."""
    seconds = min(_timed(works, 1, 1, mesh)[0] for _ in range(TRIALS))
    return min(MOST_REPEATS, max(1, math.ceil(least / max(seconds, 1e-9))))


def _timed(works: Sequence[Work], repeats: int, ranks: int, mesh: Mesh) -> tuple[float, float]:
    """Seconds of one run on the slowest of the first `ranks` ranks, and their processor seconds on
    the average."""
    begin_together(mesh)
    began, worked = time.perf_counter(), time.process_time()
    if mesh.rank < ranks:
        for number in range(repeats):
            works[number % len(works)]()
        finish_work(mesh.device)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    begin_together(mesh)  # asleep, where gathering might look for the others all the time
    every = values_of_all(mesh, seconds / repeats, cpu / repeats)[:ranks]
    return float(every[:, 0].amax()), float(every[:, 1].mean())
