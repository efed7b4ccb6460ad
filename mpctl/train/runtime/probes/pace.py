"""Times one kernel whenever a line comes in, and answers with its seconds (measure/bench/yardstick.py).

    python -m mpctl.train.runtime.probes.pace PARENT REQUEST.json

REQUEST.json: {"job": the job, "case": a KernelCase}. PARENT: process id, with which this one ends.
Between two lines it sleeps. Seconds are processor time of one run: the time that other programs had
the core is no property of it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from mpctl.train.runtime.process import die_with_parent

RUNS = 5


def main(parent: int, request: Path) -> None:
    """Answer until stdin ends."""
    die_with_parent(parent)
    import torch

    from mpctl.spec.load import parse
    from mpctl.train.kernels.backend import TORCH_BACKEND
    from mpctl.train.runtime.probes.kernels import Bench, make_kernel

    torch.set_num_threads(1)
    asked = json.loads(request.read_text("utf-8"))
    job, device = parse(asked["job"]), torch.device("cpu")
    work = make_kernel(Bench(asked["case"], job, device, TORCH_BACKEND))
    for _ in sys.stdin:
        print(seconds_of(work), flush=True)


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """The median of several runs after one that fills the caches."""
    work()
    taken = []
    for _ in range(RUNS):
        began = clock()
        work()
        taken.append(clock() - began)
    return median(taken)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
