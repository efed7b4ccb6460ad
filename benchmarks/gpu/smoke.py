"""A minute on a machine with a GPU: does each thing that was never run on one work at all?

    python -m benchmarks.gpu.smoke [--json FILE] [--only TEXT] [--device cpu]

A line a check, `ok` or `FAILED: reason`, with its seconds; FILE holds the same after each, so that
a call that is cut keeps what it has. The exit code is the number of failures. The checks run one
after the other in a child process; one that takes longer than its limit is ended with that process,
and the others go on in a new one, as they do after a failure of CUDA, which may have spoilt it.
On a CPU kernels of Triton are interpreted, and what needs a GPU is skipped with the reason.

What is checked is in smoke_checks.py.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from benchmarks.gpu.processes import child_environment
from benchmarks.gpu.smoke_checks import CHECKS
from mpctl.core.durable import write_whole

START_SECONDS = 60.0  # of the child: Python and this package, without torch
SLOWER = {"cuda": 1, "cpu": 5}
"""By which limits are multiplied: an interpreted kernel takes seconds, on busy cores more."""
SCHEMA = "mpctl.gpu-smoke/1"


@dataclass(frozen=True)
class Result:
    """How a check ended. words: what was found, why it failed, or why it was skipped."""

    name: str
    status: Literal["ok", "FAILED", "skipped"]
    words: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status:7} {self.seconds:5.1f} s  {self.name}: {self.words}"


class Child:
    """A process that makes checks, one after the other. lines: what it has printed, None at its
    end."""

    def __init__(self, names: Sequence[str], device: str) -> None:
        variables = child_environment()
        if device == "cpu" and find_spec("triton") is not None:
            variables["TRITON_INTERPRET"] = "1"
        command = [sys.executable, "-m", "benchmarks.gpu.smoke_checks", device, *names]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=variables, start_new_session=True
        )
        self.lines = queue.SimpleQueue[str | None]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def result(self, name: str, seconds: float) -> Result:
        """That of the check that runs, which is to take at most `seconds`."""
        began = time.monotonic()
        while True:
            left = seconds - (time.monotonic() - began)
            try:
                line = self.lines.get(timeout=max(0.0, left))
            except queue.Empty:
                return Result(name, "FAILED", f"not done after {seconds:.0f} s: ended", seconds)
            if line is None:
                words = f"its process ended with code {self.process.wait()}"
                return Result(name, "FAILED", words, time.monotonic() - began)
            with suppress(ValueError, TypeError):  # a library's own line
                return Result(**json.loads(line))

    def end(self) -> None:
        """End the process with all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def results(names: Sequence[str], device: str) -> Iterator[Result]:
    """Make these checks, in their order."""
    left = list(names)
    while left:
        child, is_new = Child(left, device), True
        try:
            while left:
                name = left.pop(0)
                limit = CHECKS[name].seconds * SLOWER[device] + START_SECONDS * is_new
                result, is_new = child.result(name, limit), False
                yield result
                is_alive = child.process.poll() is None
                is_late = result.seconds >= limit
                if result.status == "FAILED" and (device == "cuda" or is_late or not is_alive):
                    break
        finally:
            child.end()


def main() -> int:
    """Make the checks; returns how many failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="file for the results, written after each check")
    parser.add_argument("--only", default="", help="checks whose name has this text: " + ", ".join(CHECKS))
    given = parser.parse_args()
    names = [name for name in CHECKS if given.only in name]
    if not names:
        parser.error(f"no check has {given.only!r} in its name (--help lists them)")
    began, done = time.monotonic(), list[Result]()
    for result in results(names, given.device):
        done.append(result)
        print(result, flush=True)
        if given.json:
            held = {"schema": SCHEMA, "device": given.device, "of": len(names), "checks": [asdict(one) for one in done]}
            write_whole(given.json, json.dumps(held, indent=1) + "\n")
    counts = {status: sum(one.status == status for one in done) for status in ("ok", "FAILED", "skipped")}
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"{words} in {time.monotonic() - began:.0f} s")
    return counts["FAILED"]


if __name__ == "__main__":
    sys.exit(main())
