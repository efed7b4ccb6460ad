"""The processes of an attempt, torchrun and its ranks: finding them, their states, their stacks,
killing them.

Where /proc is hidden no rank can be found; torchrun is then killed alone, and the kernel kills each
rank with it (train/runtime/process.py).

A rank writes its Python stacks to its log (RUN/logs/rank-N.log) when its host asks for them. At
STACK_SIGNAL faulthandler writes the stacks of all threads of the rank. That needs neither the
interpreter's lock nor a return to Python code: a rank inside of a collective answers, too. A
stopped process (SIGSTOP) does not, and one in an uninterruptible system call only after that call.
faulthandler writes the last call first and the main thread last:

    Thread 0x00007f8a (most recent call first):
      File "/lib/threading.py", line 320 in wait
      File "/lib/threading.py", line 1002 in _bootstrap

    Current thread 0x00007f8b (most recent call first):
      File "/src/mpctl/train/transport/shared.py", line 198 in _pause
      File "/src/mpctl/train/runtime/worker.py", line 70 in main
      File "<frozen runpy>", line 198 in _run_module_as_main
"""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from mpctl.records.rundir.breadcrumb import STACK_SIGNAL, BreadcrumbState, HostBreadcrumbs
from mpctl.records.rundir.directory import RunDir
from mpctl.run.hosts.machine import memory_kills
from mpctl.run.launch.attempt import STOPPED, AttemptPhase, NodeState, RankState
from mpctl.run.launch.node.left_processes import has_ended
from mpctl.run.launch.node.program import HostProgram

UNREADABLE = (psutil.Error, OSError)
KILL_SECONDS, END_POLL_SECONDS = 10.0, 0.02
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
THREAD = re.compile(r"^(Current thread|Thread) 0x")
PACKAGE = "/mpctl/"
PROGRAM = f"{PACKAGE}train/runtime/program.py"
LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib/python3[^/]*/")
STACK_SECONDS, STACK_POLL_SECONDS = 1.0, 0.05
"""Time limit for the ranks of a host to write their stacks, and the pause between two reads."""
DUMP_BYTES = 1 << 18
UNANSWERING = (*STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class HostRanks:
    """The ranks of one host in one attempt. node: the host's index in the plan; process: torchrun,
    or the worker of the only rank, set by a subclass; kills: processes that were killed before for
    lack of memory; is_ended: whether `end` was called; program: where the ranks run one; is_swept:
    whether what it had left when the process ended was ended too."""

    process: subprocess.Popen[bytes]

    def __init__(self, run: RunDir, node: int, ranks: Sequence[int], program: HostProgram | None = None) -> None:
        """Raises OSError when there is no memory to share with the ranks."""
        self.run, self.node, self.ranks, self.program = run, node, ranks, program
        self.breadcrumbs = HostBreadcrumbs(ranks, run.path)
        self.found: dict[int, psutil.Process] = {}
        self.kills, self.is_ended, self.is_swept = memory_kills(), False, False

    def find(self) -> Mapping[int, psutil.Process]:
        """The processes of the ranks that have started, by rank."""
        if len(self.found) < len(self.ranks):
            with suppress(*UNREADABLE):
                for child in psutil.Process(self.process.pid).children():
                    with suppress(*UNREADABLE, KeyError, ValueError):  # just starting or ending
                        self.found[int(child.environ()["RANK"])] = child
        return self.found

    def poll(self) -> AttemptPhase:
        """The phase of the attempt on this host."""
        shared_state = self.breadcrumbs
        return AttemptPhase.of(
            self.process.poll(), is_failing=shared_state.has_failed, has_joined=shared_state.has_joined
        )

    def snapshot(self) -> NodeState:
        """The current state of the ranks; code: exit code of the process, negative for a signal."""
        code, found, shared_state = self.process.poll(), self.find(), self.breadcrumbs
        if self.program is not None:
            self.program.look(found)
        if self.program is not None and code is not None and not self.is_swept:
            self.program.end_left(self.process.pid)
            self.is_swept = True
        return NodeState(
            node=self.node,
            host=socket.gethostname(),
            ranks={rank: self._state(rank, found.get(rank)) for rank in self.ranks},
            code=code,
            failures=shared_state.failures(),
            memory_kills=memory_kills() - self.kills,
            ended=() if self.program is None else tuple(self.program.ended),
        )

    def _state(self, rank: int, process: psutil.Process | None) -> RankState:
        state = process_state(process, self.breadcrumbs.state(rank))
        if self.program is None or process is None:
            return state
        seconds = self.program.seconds.get(process.pid, state.processor_seconds)
        written = self.program.state(rank, state.breadcrumb)
        return replace(state, processor_seconds=seconds, breadcrumb=written)

    def request_stop(self) -> None:
        """Have the ranks finish their step, save and end."""
        self.breadcrumbs.request_stop()
        if self.program is not None:
            self.program.stop(self.ranks, self.find().values())

    def stacks(self) -> dict[int, str]:
        """The call that the main thread of each rank is in; ranks that do not answer are absent."""
        readers = {}
        for rank, process in self.find().items():
            with suppress(*UNREADABLE):
                # A rank that has written its breadcrumb handles the signal; before, it would die.
                is_working = self.breadcrumbs.state(rank).is_working
                if is_working and process.status() not in UNANSWERING:
                    readers[rank] = StackReader(self.run.log(rank))
                    process.send_signal(STACK_SIGNAL)
        return read_stacks(readers)

    def end(self) -> NodeState:
        """Kill what still runs; the last state."""
        self.is_ended = self.process.poll() is None
        unkilled = kill_tree(self.process)
        if self.program is not None:
            self.program.end_left(self.process.pid)
        self.breadcrumbs.close()
        return replace(self.snapshot(), unkilled=unkilled)


def process_state(process: psutil.Process | None, breadcrumb: BreadcrumbState) -> RankState:
    """A rank's state: what this host sees of its process (None: there is none), and what the rank
    wrote in its breadcrumb."""
    try:
        if process is None:
            return RankState(breadcrumb=breadcrumb)
        times = process.cpu_times()
        return RankState(
            str(process.status()),
            float(times.user + times.system),
            breadcrumb,
            major_faults(process.pid),
            swapped_bytes(process.pid),
        )
    except UNREADABLE:
        return RankState(breadcrumb=breadcrumb)


def major_faults(pid: int) -> int:
    """Page faults of a process so far that had to wait for a disk; 0 when it cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        # proc(5): majflt is field 12; the name in field 2 may hold spaces and brackets.
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return int(stat.rpartition(")")[2].split()[9])
    return 0


def swapped_bytes(pid: int) -> int:
    """Memory of a process that is in swap space, in bytes; 0 when it cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
        return 1024 * int(status.partition("VmSwap:")[2].split()[0])
    return 0


def kill_tree(process: subprocess.Popen[bytes], seconds: float = KILL_SECONDS) -> tuple[int, ...]:
    """Kill a process and everything it started, and wait until they are gone; processes that have
    ended are left alone. Returns the ids of those that still run after so many seconds: nothing
    ends a process in a system call that cannot be interrupted (state D: a file system that does not
    answer) until that call returns."""
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except UNREADABLE:
        tree = []
    if process.poll() is None:
        process.kill()
    for child in tree:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    deadline = time.monotonic() + seconds
    with suppress(*UNREADABLE):
        _, tree = psutil.wait_procs(tree, timeout=seconds)
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    own = (process.pid,) if process.poll() is None else ()
    return (*own, *(child.pid for child in tree if not has_ended(child)))


def end_processes(processes: Sequence[subprocess.Popen[bytes]], seconds: float, kill_seconds: float) -> None:
    """Wait so long for processes to end by themselves, then ask those that still run to, and kill
    them kill_seconds later. One that cannot be killed is left."""
    for wait, end in ((seconds, subprocess.Popen.terminate), (kill_seconds, subprocess.Popen.kill)):
        deadline = time.monotonic() + wait
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(END_POLL_SECONDS)
        for process in processes:
            if process.poll() is None:
                end(process)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(kill_seconds)


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        _, package, inside = self.file.rpartition(PACKAGE)
        file = f"mpctl/{inside}" if package else self.file
        return f"{file}:{self.line} in {self.function}"


def main_stack(text: str) -> tuple[Frame, ...]:
    """Return the main thread's calls, the last one first, from the last dump in the text of a log; empty if there is
    none."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if THREAD.match(line):
            threads.append([])
        elif threads and (match := FRAME.match(line)):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return tuple(threads[-1]) if threads else ()


def innermost(stack: tuple[Frame, ...]) -> str:
    """The innermost call in mpctl's code, or of a program in its own, and the innermost call of
    other code below it.

    `mpctl/train/runtime/batches.py:117 in _batch, in /lib/numpy/core.py:8 in stack`; empty for no stack.
    """
    if not stack:
        return ""
    inside = next((frame for frame in stack if PACKAGE in frame.file), None)
    if inside is not None and inside.file.endswith(PROGRAM):
        above = stack[: stack.index(inside)]
        inside = next((frame for frame in above if not LIBRARY.search(frame.file)), None)
    if inside is None or inside is stack[0]:
        return str(stack[0])
    return f"{inside}, in {stack[0]}"


class StackReader:
    """Reads what is appended to a log from now on, until a dump in it is complete."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.offset = log.stat().st_size if log.exists() else 0
        self.text = ""

    def is_complete(self) -> bool:
        """Whether a dump has arrived and nothing more since the last call."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(self.offset)
                text = stream.read(DUMP_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return False
        is_same, self.text = text == self.text, text
        return is_same and bool(main_stack(text))


def read_stacks(readers: Mapping[int, StackReader]) -> dict[int, str]:
    """Return the `innermost` call of each rank, once all have answered or STACK_SECONDS have passed; ranks that have
    not answered are left out."""
    deadline, pending = time.monotonic() + STACK_SECONDS, list(readers.values())
    while time.monotonic() < deadline:
        pending = [reader for reader in pending if not reader.is_complete()]
        if not pending:
            break
        time.sleep(STACK_POLL_SECONDS)
    where = {rank: innermost(main_stack(reader.text)) for rank, reader in readers.items()}
    return {rank: text for rank, text in where.items() if text}
