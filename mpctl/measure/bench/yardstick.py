"""How fast a machine is at a given time, relative to other times of the same bench.

A core that shares a socket with other virtual machines, or becomes hot, changes its speed in the
course of seconds to minutes, and with it every kernel and every step. One layer's pass is timed
again and again, before and after each measurement. A measurement of t seconds between yardsticks
of y is t x usual / y at the usual pace, the median of all yardsticks.

By hand, yardsticks of 1, 1 and 2 ms: a step of 3 s between the last two is 2 s at the usual pace.

>>> YardstickTimes([1.0, 1.0, 2.0]).factor(1.5) * 3.0
2.0
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from mpctl.core.errors import RunFailed
from mpctl.records.rundir.requests import KernelCase
from mpctl.spec.job import JobSpec

REQUEST, LOG = "yardstick.json", "yardstick.err"  # no *.log: `mpctl calibrate` reads those


@dataclass
class YardstickTimes:
    """Seconds of the yardstick, in the order in which they were measured."""

    seconds: list[float] = field(default_factory=list)

    @property
    def usual(self) -> float:
        """The median; 1 before the first."""
        return median(self.seconds or [1.0])

    def factor(self, around: float) -> float:
        """Return the factor that corrects seconds measured while the yardstick took `around`."""
        return self.usual / around

    @property
    def drift(self) -> float:
        """Excess of the slowest over the fastest; 0 before the first.

        >>> YardstickTimes([2.0, 2.5, 3.0]).drift
        0.5
        """
        return max(self.seconds, default=1.0) / min(self.seconds, default=1.0) - 1


@contextmanager
def cpu_yardstick(folder: Path, job: JobSpec, case: KernelCase) -> Iterator[Callable[[], float]]:
    """A call that times this kernel on one core, in a process that sleeps in between. folder: gets
    its request and its log. The call raises RunFailed where the process has ended."""
    request = {"job": job.model_dump(mode="json"), "case": case}
    (folder / REQUEST).write_text(json.dumps(request, indent=1) + "\n", "utf-8")
    command = [sys.executable, "-m", "mpctl.train.runtime.probes.pace", str(os.getpid())]
    with (
        (folder / LOG).open("wb") as log,
        subprocess.Popen(
            [*command, str(folder / REQUEST)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        ) as process,
    ):
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None, "both are pipes"

        def seconds() -> float:
            try:
                asked.write("\n")
                asked.flush()
                return float(answers.readline())
            except (OSError, ValueError):
                raise RunFailed(f"the yardstick's process has ended; its log: {folder / LOG}") from None

        try:
            yield seconds
        finally:
            process.kill()
