"""RUN/launcher.json, schema mpctl.launcher/1: which process launched this run last, where and how.

The launcher writes it before it starts any rank, and again at every resumption. It is not removed
at the end: `mpctl status` tells from it whether the launcher still runs. A process id alone cannot
tell that, because the system gives it to another process later; the time when the process started
is therefore recorded with it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import psutil
from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl import __version__
from mpctl.durable import write_whole

LAUNCHER_SCHEMA: Literal["mpctl.launcher/1"] = "mpctl.launcher/1"
START_TOLERANCE = 2.0
"""Seconds by which two readings of one process's start may differ: it is computed from the time of
the boot, which moves when the clock is set."""


class LauncherRecord(TypedDict):
    """The content of launcher.json.

    backend: local, slurm, ssh, kubernetes or torchrun; host: name of the host on which the launcher
    runs; pid: its process id there; process_started: when that process began, None where /proc is
    hidden; started: when it wrote this file; both in seconds since 1970. job_id: the scheduler's
    name of the job, None without a scheduler; hosts: the hosts of the ranks by node rank, None
    while they are not known; version: of mpctl.
    """

    schema: Literal["mpctl.launcher/1"]
    backend: str
    host: str
    pid: int
    process_started: float | None
    started: float
    job_id: str | None
    hosts: list[str] | None
    version: str


def this_launcher(
    backend: str, *, job_id: str | None = None, hosts: Sequence[str] | None = None
) -> LauncherRecord:
    """The record of a launch by this process."""
    return {
        "schema": LAUNCHER_SCHEMA,
        "backend": backend,
        "host": platform.node(),
        "pid": os.getpid(),
        "process_started": process_start(os.getpid()),
        "started": time.time(),
        "job_id": job_id,
        "hosts": None if hosts is None else list(hosts),
        "version": __version__,
    }


def write_launcher(path: Path, record: LauncherRecord) -> None:
    """Write launcher.json, whole or not at all. Raises OSError."""
    write_whole(path, json.dumps(record, indent=1) + "\n")


def process_start(pid: int) -> float | None:
    """When a process of this host began, in seconds since 1970; None when there is no such process
    or /proc is hidden."""
    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, OSError, ValueError, OverflowError):
        return None


def is_same_process(pid: int, started: float) -> bool:
    """Whether the process of this host that began at `started` (seconds since 1970) still has this
    process id and has not ended."""
    try:
        process = psutil.Process(pid)
        is_ended = process.status() == psutil.STATUS_ZOMBIE
        return abs(process.create_time() - started) <= START_TOLERANCE and not is_ended
    except (psutil.Error, OSError, ValueError, OverflowError):
        return False
