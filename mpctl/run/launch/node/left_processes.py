"""Processes left by a program: daemons with a session of their own, such as loggers that outlive their trainer, or all
processes of a rank after its launcher was killed by SIGKILL.

They are nobody's children any more, but carry the environment variables of their rank: the run
directory, and the process id of the torchrun that started the rank, which is another one on every
host and in every attempt. Left alone are processes of other users, other runs and other containers,
`mpctl` commands that somebody started from within the program, with all that these have started
(a nested `mpctl launch` ends its own), and whatever has another environment (`env -i`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path, PurePath

import psutil

from mpctl.records.rundir.breadcrumb import TORCHRUN
from mpctl.records.rundir.program import RUN_DIR

END_SECONDS, KILL_SECONDS, POLL_SECONDS = 3.0, 1.0, 0.05
"""Time limits for a process to end after SIGTERM, and after SIGKILL."""
OWN_PROGRAM = "mpctl.train.runtime.program"
Variables = Mapping[str, str]


def left_by(run: Path, torchrun: int) -> Callable[[Variables], bool]:
    """Whether variables are those of a rank of this torchrun. run: the run directory, resolved."""
    return lambda found: found.get(RUN_DIR) == str(run) and found.get(TORCHRUN) == str(torchrun)


def orphaned(run: Path) -> Callable[[Variables], bool]:
    """Return a test whether variables belong to a rank of this run after its torchrun has ended."""

    def is_orphaned(found: Variables) -> bool:
        torchrun = found.get(TORCHRUN, "")
        is_ours = found.get(RUN_DIR) == str(run) and torchrun.isdecimal()
        return is_ours and _is_gone(int(torchrun))

    return is_orphaned


def end_processes_with(is_left: Callable[[Variables], bool]) -> list[str]:
    """End the processes with such variables by SIGTERM, and those that still run by SIGKILL. Return their names, `sleep
    (4711)`."""
    left = find_processes(is_left)
    names = [f"{name} ({process.pid})" for process, name in left]
    if left:
        _send(psutil.Process.terminate, (process for process, _ in left))
        _wait([process for process, _ in left], END_SECONDS)
        rest = [process for process, _ in find_processes(is_left)]
        _send(psutil.Process.kill, rest)
        _wait(rest, KILL_SECONDS)
    return names


def find_processes(is_left: Callable[[Variables], bool]) -> list[tuple[psutil.Process, str]]:
    """Find the processes of this user and this container with such variables, each with its name. `mpctl` commands and
    the processes below them are left out."""
    here, found = _container(os.getpid()), []
    commands: set[int] = set()
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if pid == os.getpid() or process.uids().real != os.getuid() or not is_left(process.environ()):
                continue
            if is_command(process.cmdline()):
                commands.add(pid)
            elif _container(pid) == here:
                found.append((process, process.name()))
    return [(process, name) for process, name in found if not _is_below(process, commands)]


def is_command(words: Sequence[str]) -> bool:
    """Whether a command line is one of mpctl, and not that of a program's rank.

    >>> is_command(["/usr/bin/python3", "/envs/a/bin/mpctl", "status"])
    True
    >>> is_command(["python", "-m", "mpctl.train.runtime.torchrun", "--nnodes=1"])
    True
    >>> is_command(["python", "-m", "mpctl.train.runtime.program", "/runs/a"])
    False
    """
    if any(PurePath(word).name == "mpctl" for word in words[:2]):
        return True
    module = next((after for word, after in pairwise(words[:5]) if word == "-m"), "")
    return module.partition(".")[0] == "mpctl" and module != OWN_PROGRAM


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie whose parent has not waited for it."""
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.Error, OSError):
        return True


def _is_gone(pid: int) -> bool:
    """Whether no process of this id runs. Process 1 of a container may never wait for orphans: a torchrun that
    died with its launcher stays as a zombie then."""
    try:
        return has_ended(psutil.Process(pid))
    except (psutil.Error, OSError, ValueError, OverflowError):
        return True


def _is_below(process: psutil.Process, commands: set[int]) -> bool:
    with suppress(psutil.Error, OSError):
        return any(parent.pid in commands for parent in process.parents())
    return False


def _container(pid: int) -> int:
    """The namespace of process ids that a process is in; 0 where the kernel has none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    return 0


def _send(end: Callable[[psutil.Process], None], processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error, OSError):
            end(process)


def _wait(processes: Sequence[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(map(has_ended, processes)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
