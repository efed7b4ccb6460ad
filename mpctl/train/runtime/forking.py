"""Ranks as copies (fork) of a process that has imported everything: importing torch and the rest of
what a rank needs takes 1.7 s of processor time, a copy some milliseconds.

A copy has only the thread that called fork. Another thread's locks would stay locked in it for
ever, and a GPU's driver does not work in it at all. So a process is copied only while it has a
single thread and has not opened a GPU (`obstacle`), before torchrun's own code starts any: the
copies wait until torchrun says with which environment to begin. Threads of OpenBLAS, which numpy
starts when it is imported, are no obstacle: OpenBLAS ends them before a fork, and starts them again
when it needs them.

/proc/PID/cmdline and /proc/PID/environ of a copy would show those of the first process. A rank has
the kernel show its own there (prctl's PR_SET_MM_MAP, Linux 3.18, which needs no privilege), so that
`ps`, `mpctl status` and the agent of its host find it as any other. Kernels without
CONFIG_CHECKPOINT_RESTORE refuse that: ranks are not forked there.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from mpctl.train.runtime.process import die_with_parent, thread_names

DRIVERS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
WAIT_SECONDS = 0.01
PR_SET_MM, PR_SET_MM_MAP, NO_FILE = 35, 14, 0xFFFFFFFF
MAP_PRIVATE_ANONYMOUS, PROT_READ_WRITE = 0x22, 0x3
Work = Callable[[Sequence[str]], None]


def import_rank_modules(niceness: int = 0) -> None:
    """Import what ranks import, and the modules of the families that come with mpctl. niceness:
    added while it imports, in a thread, since a process may not take back its own."""
    if niceness:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(_import_modules, niceness).result()
    else:
        _import_modules()


def _import_modules(niceness: int = 0) -> None:
    if niceness:
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(before + niceness, 19))
    from mpctl.core.errors import InputError
    from mpctl.model.families import all_builtin
    from mpctl.train.families.implementation import get_implementation

    with suppress(ImportError, InputError):  # the ranks that need it will say so in their logs
        # ruff: noqa: F401
        import numpy.random
        import torch.fx.experimental.symbolic_shapes  # by torch.autograd.backward, with sympy

        import mpctl.model.layout.job_layout
        import mpctl.spec.load
        import mpctl.train.runtime.build
        import mpctl.train.runtime.process_group
        import mpctl.train.runtime.report
        import mpctl.train.runtime.worker

        for family in all_builtin():
            get_implementation(family.name)


def obstacle() -> str:
    """Return the reason why this process must not be copied; empty if it may."""
    if sys.platform != "linux":
        return f"forking ranks is for Linux, this is {sys.platform}"
    if drivers := [path for path in _open_files() if path.startswith(DRIVERS)]:
        return f"this process has opened {drivers[0]}"
    if (pid := os.fork()) == 0:  # libraries that end their threads at a fork have ended them then
        os._exit(0)
    os.waitpid(pid, 0)
    if len(names := thread_names()) > 1:
        return f"this process has {len(names)} threads: {', '.join(names)}"
    return ""


def _open_files() -> list[str]:
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of this listing
            paths.append(str(link.readlink()))
    return paths


class ForkedRank:
    """A copy of this process, with the methods of subprocess.Popen that torchrun calls. pipe: what
    is written to it before it is closed is the copy's order."""

    def __init__(self, pid: int, pipe: socket.socket) -> None:
        self.pid, self.pipe = pid, pipe
        self.returncode: int | None = None

    def begin(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Have it work. words: its command line; environment: all of its environment."""
        with self.pipe:
            try:
                self.pipe.sendall(json.dumps([list(words), dict(environment)]).encode())
            except OSError:  # it has been killed, as `poll` will tell
                return

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the process to end and return its exit code. Raises subprocess.TimeoutExpired
        after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout)
            time.sleep(WAIT_SECONDS)
        return code


def fork_ranks(count: int, work: Work) -> list[ForkedRank]:
    """So many copies of this process, each the leader of a session, which end with it. A copy does
    not return from here: it waits for its order, calls `work` with its command line, and ends as
    every Python program does."""
    parent, ranks = os.getpid(), list[ForkedRank]()
    sys.stdout.flush()
    sys.stderr.flush()
    for _ in range(count):
        near, far = socket.socketpair()
        if (pid := os.fork()) == 0:
            for pipe in (near, *(rank.pipe for rank in ranks)):
                pipe.close()
            work(_await_order(parent, far))
            sys.exit()
        far.close()
        near.recv(1)  # it leads its own session now, or has ended
        ranks.append(ForkedRank(pid, near))
    return ranks


def _await_order(parent: int, pipe: socket.socket) -> list[str]:
    """In a copy: become a process as if started anew, and wait for the order; the command line."""
    os.setsid()
    die_with_parent(parent)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # or every rank would draw the same; `random` does so
    pipe.sendall(b"\0")
    with pipe, pipe.makefile("rb") as stream:
        order = stream.read()
    if not order:
        os._exit(1)
    words, environment = json.loads(order)
    os.environ.clear()
    os.environ.update(environment)
    show_process(words, environment)
    return list(words)


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map (prctl(2)): where parts of a process are in its memory."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                "start_code",
                "end_code",
                "start_data",
                "end_data",
                "start_brk",
                "brk",
                "start_stack",
                "arg_start",
                "arg_end",
                "env_start",
                "env_end",
                "auxv",
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show_process(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Have /proc show this command line and this environment for this process. Returns whether the
    kernel does; nothing has changed where it does not."""
    arguments = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in environment.items())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
    number = ctypes.c_long
    size = len(arguments) + len(variables)
    # Never freed: the kernel reads it for as long as the process lives.
    place = libc.mmap(None, number(size), PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, -1, number(0))
    if place in (None, ctypes.c_void_p(-1).value):
        return False
    ctypes.memmove(place, arguments + variables, size)
    # proc(5): field 3 is the first after the name, which may hold spaces and brackets.
    stat = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    start_code, end_code, start_stack, start_data, end_data, start_brk = (
        int(stat[field - 3]) for field in (26, 27, 28, 45, 46, 47)
    )
    middle = place + len(arguments)
    layout = _MemoryMap(
        start_code,
        end_code,
        start_data,
        end_data,
        start_brk,
        libc.sbrk(0),
        start_stack,
        place,
        middle,
        middle,
        place + size,
        0,
        0,
        NO_FILE,
    )
    bytes_of_layout = number(ctypes.sizeof(layout))
    return not libc.prctl(PR_SET_MM, number(PR_SET_MM_MAP), ctypes.byref(layout), bytes_of_layout, number(0))
