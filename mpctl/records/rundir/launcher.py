"""Record of the launcher of a run, and the request that the run stop.

RUN/launcher.json, schema mpctl.launcher/1, is written before any rank starts, and again at every
resumption. It is not removed at the end: `mpctl status` reads from it whether the launcher still
runs. A process id alone does not show that, because the system later reuses it; the time when the
process started is therefore recorded with it. RUN/nodes/hosts.json, schema mpctl.hosts/1, has the
host of every rank of the last attempt.

RUN/stop-request, schema mpctl.stop/1, is written by `mpctl stop RUN`, on any host that shares the
directory. Only the launcher reads it, twice a second, and treats it as a SIGTERM, an urgent one as
two of them: the first makes the ranks finish their step and save, the second ends them at once. A
file of any other content, an empty one for instance, is a request that is not urgent; one that
cannot be read is none. A launcher that starts removes what an earlier one left.
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
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl import __version__
from mpctl.core.durable import write_whole

START_TOLERANCE = 2.0
"""Seconds by which two readings of one process's start may differ: it is computed from the boot
time, which changes when the clock is set."""
STOP_SCHEMA: Literal["mpctl.stop/1"] = "mpctl.stop/1"


@dataclass(frozen=True, kw_only=True)
class LauncherRecord:
    """The content of launcher.json; what older versions did not write has a default.

    backend: local, slurm, ssh, kubernetes or torchrun; host: name of the host on which the launcher
    runs; pid: its process id there; process_started: when that process began, None where /proc is
    hidden; started: when it wrote this file; both in seconds since 1970. job_id: the scheduler's
    name of the job, None without a scheduler; hosts: the hosts of the ranks by node rank, None
    while they are not known; version: of mpctl.
    """

    schema: Literal["mpctl.launcher/1"] = "mpctl.launcher/1"
    backend: str = "local"
    host: str
    pid: int
    process_started: float | None = None
    started: float | None = None
    job_id: str | None = None
    hosts: Sequence[str] | None = None
    version: str = ""


LAUNCHER: TypeAdapter[LauncherRecord] = TypeAdapter(LauncherRecord)


def this_launcher(backend: str, *, job_id: str | None = None, hosts: Sequence[str] | None = None) -> LauncherRecord:
    """The record of a launch by this process."""
    return LauncherRecord(
        backend=backend,
        host=platform.node(),
        pid=os.getpid(),
        process_started=process_start(os.getpid()),
        started=time.time(),
        job_id=job_id,
        hosts=hosts,
        version=__version__,
    )


def write_launcher(path: Path, record: LauncherRecord) -> None:
    """Write launcher.json atomically. Raises OSError."""
    write_whole(path, LAUNCHER.dump_json(record, indent=1).decode() + "\n", mode=0o644)


def read_launcher(run: Path) -> LauncherRecord | None:
    """Read the launcher of the run in a directory; None if launcher.json is missing or damaged."""
    try:
        return LAUNCHER.validate_json((run / "launcher.json").read_bytes())
    except (OSError, ValidationError):
        return None


def launcher_is_alive(launcher: LauncherRecord) -> bool | None:
    """Whether the process that launched a run still exists; None when this host cannot find out."""
    if launcher.host != platform.node() or launcher.process_started is None:
        return None
    return is_same_process(launcher.pid, launcher.process_started)


def has_ended(run: Path) -> bool:
    """Whether the last launcher wrote how its run ended; a later one begins by launcher.json."""
    return 0 < written(run / "launcher.json") <= written(run / "summary.json")


def written(path: Path) -> float:
    """Return the time of the last write to a file, in seconds since 1970; 0 without one."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def process_start(pid: int) -> float | None:
    """Return the start of a process of this host, in seconds since 1970; None if there is no such
    process or /proc is hidden."""
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


class StopRequest(TypedDict):
    """The content of the file. now: end the ranks at once, without saving; relayed: it passes on a
    signal that only one process of the launch received; host: of the process that wrote it; time:
    seconds since 1970."""

    schema: Literal["mpctl.stop/1"]
    now: bool
    relayed: bool
    host: str
    time: float


def write_stop_request(path: Path, *, now: bool, relayed: bool = False) -> None:
    """Ask for a stop. now: end the ranks at once, without saving; relayed: in place of a signal
    that the launcher may not have received. Raises OSError."""
    request: StopRequest = {
        "schema": STOP_SCHEMA,
        "now": now,
        "relayed": relayed,
        "host": platform.node(),
        "time": time.time(),
    }
    write_whole(path, json.dumps(request) + "\n")


def is_stop_asked_for(path: Path) -> bool:
    """Whether the file is a request of `mpctl stop`, and not one that passes a signal on."""
    return path.exists() and not read_table(path).get("relayed")


def stop_signal(summary: Path, request: Path) -> int | None:
    """The signal that stopped the run that this summary is of; None where it ended otherwise, or
    where `mpctl stop` asked for it."""
    table = read_table(summary)
    number = table.get("signal")
    if table.get("status") != "stopped" or is_stop_asked_for(request):
        return None
    return number if isinstance(number, int) else None


def read_table(path: Path) -> dict[str, object]:
    """A JSON document of the run directory; empty where there is none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def requested_signals(path: Path) -> int:
    """The number of SIGTERMs that the file represents: 0 without a file, 1 to finish the step and
    save, 2 to end at once. A file that cannot be read asks for nothing: a file server that fails
    for a moment, or a login that has expired, must not end a run."""
    try:
        content = path.read_bytes()
    except OSError:
        return 0
    try:
        request = json.loads(content)
    except (ValueError, RecursionError):
        return 1
    return 2 if isinstance(request, dict) and request.get("now") is True else 1


class RanksOfHost(TypedDict):
    """Consecutive ranks: the number of the first, and how many."""

    first: int
    count: int


class HostEntry(TypedDict):
    """The ranks of one host. node: its index in the plan; host: its name."""

    node: int
    host: str
    ranks: RanksOfHost


class HostsDocument(TypedDict):
    """The content of the file, a host each, in the order of the plan's nodes."""

    schema: Literal["mpctl.hosts/1"]
    hosts: list[HostEntry]


def write_hosts(path: Path, names: Sequence[str], ranks: int) -> None:
    """Write the file for hosts with these names and so many ranks on each. Raises OSError."""
    hosts: list[HostEntry] = [
        {"node": node, "host": name, "ranks": {"first": node * ranks, "count": ranks}}
        for node, name in enumerate(names)
    ]
    document: HostsDocument = {"schema": "mpctl.hosts/1", "hosts": hosts}
    write_whole(path, json.dumps(document, indent=1) + "\n")
