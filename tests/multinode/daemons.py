"""Daemons that a test starts in the foreground, and that end with it.

Each daemon gets a process group of its own. Ending one ends its process tree, by the process ids
that were seen below it, and nothing else of the machine; the kernel kills the daemon if pytest is
killed (prctl's PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Daemon:
    """One daemon. Its output is appended to `log`."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.command, self.log = [*command], log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                self.command,
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def is_running(self) -> bool:
        """Whether the daemon has not ended."""
        return self.process.poll() is None

    def end(self, number: int = signal.SIGTERM, seconds: float = 5.0) -> None:
        """Send it a signal; kill it and everything below it after so many seconds."""
        below = descendants(self.process.pid)
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        if self.is_running:
            self.process.kill()
            self.process.wait()
        for child in below:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(below, timeout=5)


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below one; none when it has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def wait_until(condition: Callable[[], bool], seconds: float, what: str | Callable[[], str]) -> float:
    """Seconds until the condition held, looked at every 0.05 s. Raises AssertionError with `what`
    when it does not within so many seconds."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {seconds:g} s: {text}")
        time.sleep(0.05)
    return time.monotonic() - start


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()
