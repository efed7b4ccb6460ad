"""Whether a run goes on: whether the process that launched it is still there.

On the host of the launcher its process answers: the one of that id and that start time. A lock on
the directory answers too, unless the file system has no locks, and for runs of versions that wrote
no launcher.json. Seen from another host, where neither may answer, a run goes on while it gives
signs of life: a step or a report of the launcher within SIGN_SECONDS by the clocks of both hosts.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

import psutil

from mpctl.rundir.directory import RunDir
from mpctl.rundir.launcher import is_same_process
from mpctl.runs.documents import SavedLauncher, read_launcher

SIGN_SECONDS = 90.0
"""A network file system may show what another host writes a minute later."""


def is_running(path: Path) -> bool:
    """Whether the run in this directory goes on."""
    launcher = read_launcher(path / "launcher.json")
    known = launcher if isinstance(launcher, SavedLauncher) else None
    if _has_ended(path):
        return False
    if known is not None and launcher_is_alive(known):
        return True
    if _is_locked(path) or _torchrun_is_alive(path):
        return True
    is_elsewhere = known is not None and known.host != platform.node()
    return is_elsewhere and time.time() - last_sign(path) < SIGN_SECONDS


def is_submitted(path: Path) -> bool:
    """Whether the run was handed to a scheduler and nothing of it has begun since then; whoever
    submitted it has ended."""
    launcher = read_launcher(path / "launcher.json")
    if not isinstance(launcher, SavedLauncher) or launcher.job_id is None:
        return False
    traces = (path / "summary.json", RunDir(path).torchrun_log)
    return max(map(_written, traces)) < _written(path / "launcher.json")


def launcher_is_alive(launcher: SavedLauncher) -> bool | None:
    """Whether the process that launched a run is still there; None when this host cannot tell."""
    if launcher.host != platform.node() or launcher.process_started is None:
        return None
    return is_same_process(launcher.pid, launcher.process_started)


def last_sign(path: Path) -> float:
    """When the run last gave a sign of life, in seconds since 1970; 0 when it never did."""
    files = ("metrics.jsonl", "launcher.json", "nodes/status.json")
    return max(_written(path / name) for name in files)


def _has_ended(path: Path) -> bool:
    """Whether the launcher has written how the run ended; a later launcher begins by writing its
    launcher.json."""
    launched = _written(path / "launcher.json")
    return 0 < launched <= _written(path / "summary.json")


def _is_locked(path: Path) -> bool:
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False


def _torchrun_is_alive(path: Path) -> bool:
    """Whether torchrun of the run is there, as for a bench, which has no launcher.json and takes no
    lock."""
    try:
        process = psutil.Process(int(RunDir(path).torchrun_pid.read_text("utf-8")))
        return str(path.resolve()) in process.cmdline()
    except (OSError, ValueError, OverflowError, psutil.Error):
        return False


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
