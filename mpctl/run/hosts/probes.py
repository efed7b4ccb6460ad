"""What probes of a host share: a thread with a time limit each, and tools such as nvidia-smi.

A probe may hang in the kernel (a network file system or a driver that does not answer); its thread
is then left behind, and the process exits without it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

TOOL_SECONDS = 15.0
UNCORRECTED = "ecc.errors.uncorrected.volatile.total"
"""nvidia-smi's name of the ECC errors since the driver was loaded that were not corrected."""
Result = TypeVar("Result")


@dataclass
class RunningProbe(Generic[Result]):
    """A probe in a separate thread. result: None until it has ended, and where it failed."""

    name: str
    probe: Callable[[], Result]
    limit: float
    result: Result | None = None
    error: str | None = None
    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)

    def start(self) -> RunningProbe[Result]:
        """Start the probe; the thread does not keep the process alive."""
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()
        return self

    def wait(self) -> None:
        """Wait until the probe has ended or its time is over."""
        self.thread.join(max(0.0, self.began + self.limit - time.monotonic()))
        if self.thread.is_alive():
            self.error = f"no answer within {self.limit:g} s"

    def _run(self) -> None:
        try:
            self.result = self.probe()
        except Exception as error:  # any failure of a probe is a result about the host
            self.error = str(error) or type(error).__name__
        self.seconds = time.monotonic() - self.began


def write_probe(folder: Path, count: int) -> None:
    """Write `count` bytes to the disk of a folder, in a file without a name. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(bytes(count))
        probe.flush()
        os.fsync(probe.fileno())


def run_tool(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a tool; one that times out gets exit code 1."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The first line of what a tool said that failed."""
    words = (done.stderr or done.stdout).strip().splitlines()
    return words[0] if words else f"exit code {done.returncode}"


def uncorrected_errors(listing: str) -> dict[int, int]:
    """The ECC errors of each GPU that has any, by its index, of a listing whose columns are index
    and UNCORRECTED; `[N/A]` counts as none.

    >>> uncorrected_errors("0, 0\\n1, 12\\n2, [N/A]\\n")
    {1: 12}
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    counts = [row for row in rows if len(row) == 2 and all(cell.isdecimal() for cell in row)]
    return {int(index): int(errors) for index, errors in counts if int(errors)}
