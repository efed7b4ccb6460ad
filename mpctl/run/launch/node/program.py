"""Supervision of a program's ranks on a host: it hears their heartbeats, tells them to stop, counts the processor time
of all their processes and ends those left over.

A heartbeat is counted when the memory of a rank says so (`mpctl.heartbeat`) and when its file has changed since the
last look. Every rank leads a session, which identifies the processes that it starts, such as the Python below a shell
script.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil

from mpctl.records.rundir.breadcrumb import BreadcrumbState
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.heartbeat import parse_report
from mpctl.run.launch.node.left_processes import end_processes_with, left_by, orphaned
from mpctl.spec.launch import StopSignal

LOOK_SECONDS = 1.0
TAIL_BYTES = 1 << 13


@dataclass
class HeardFile:
    """The heartbeat file of a rank. sign: its size and time of change; beats: how often that has
    changed; beat_time: when it last did, in seconds since 1970; doing: `step 7`, by its last line,
    empty where that is no report."""

    sign: tuple[int, int] = (0, 0)
    beats: int = 0
    beat_time: float = 0.0
    doing: str = ""


@dataclass
class HostProgram:
    """The ranks of a program on this host. next_look: when files and processes are read again, by
    time.monotonic(); seconds: processor time by session, in seconds; ended: processes that ranks
    had left and that were ended, `sleep (4711)`."""

    run: RunDir
    stop_signal: StopSignal
    files: dict[int, HeardFile] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    next_look: float = float("-inf")
    ended: list[str] = field(default_factory=list)

    def look(self, processes: Mapping[int, psutil.Process]) -> None:
        """Read the heartbeat files of the ranks and the processor time of their sessions, at most
        once in LOOK_SECONDS."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + LOOK_SECONDS
        self.seconds = _processor_seconds({process.pid for process in processes.values()})
        for rank in processes:
            self._hear(rank, self.files.setdefault(rank, HeardFile()))

    def _hear(self, rank: int, heard: HeardFile) -> None:
        path = self.run.heartbeat(rank)
        with suppress(OSError):
            stat = path.stat()
            if (sign := (stat.st_size, stat.st_mtime_ns)) == heard.sign:
                return
            heard.sign, heard.beats, heard.beat_time = sign, heard.beats + 1, stat.st_mtime
            with path.open("rb") as stream:
                stream.seek(max(0, stat.st_size - TAIL_BYTES))
                lines = stream.read(TAIL_BYTES).splitlines()
            report = parse_report(lines[-1]) if lines else None
            heard.doing = f"step {report.step}" if report else ""

    def state(self, rank: int, written: BreadcrumbState) -> BreadcrumbState:
        """Return the state that a rank wrote into its memory, with the heartbeats of its file."""
        heard = self.files.get(rank)
        if heard is None or not heard.beats or not written.is_working:
            return written
        doing = written.doing if written.beats or not heard.doing else heard.doing
        latest = max(written.beat_time, heard.beat_time)
        return replace(written, beats=written.beats + heard.beats, beat_time=latest, doing=doing)

    def stop(self, ranks: Iterable[int], processes: Iterable[psutil.Process]) -> None:
        """Tell ranks to stop: by the file of each, then by the signal, if there is one. Only the
        process of a rank is sent a signal, not what it has started."""
        for rank in ranks:
            with suppress(OSError):
                self.run.program_stop(rank).touch()
        for process in processes if self.stop_signal != "none" else ():
            with suppress(psutil.Error, OSError):
                process.send_signal(signal.Signals[self.stop_signal])

    def end_left(self, torchrun: int) -> None:
        """End what the ranks of this torchrun have started and left (left_processes.py)."""
        self.ended += end_processes_with(left_by(self.run.path.resolve(), torchrun))

    def end_orphans(self) -> None:
        """End the processes that earlier attempts with a killed launcher have left on this host."""
        self.ended += end_processes_with(orphaned(self.run.path.resolve()))


def _members(sessions: set[int]) -> Iterator[tuple[int, psutil.Process]]:
    """The processes of these sessions, each after its session."""
    for pid in psutil.pids() if sessions else ():
        with suppress(psutil.Error, OSError):
            if (session := os.getsid(pid)) in sessions:
                yield session, psutil.Process(pid)


def _processor_seconds(sessions: set[int]) -> dict[int, float]:
    """Processor time of the processes of each of these sessions, in seconds."""
    seconds = dict.fromkeys(sessions, 0.0)
    for session, process in _members(sessions):
        with suppress(psutil.Error, OSError):
            times = process.cpu_times()
            seconds[session] += times.user + times.system
    return seconds
