"""Python stacks that a rank writes to its log (RUN/logs/rank-N.log) when its host asks for them.

At STACK_SIGNAL faulthandler writes the stacks of all threads of the rank. That needs neither the
interpreter's lock nor a return to Python code: a rank inside of a collective answers, too. A
stopped process (SIGSTOP) does not, and one in an uninterruptible system call only after it.

What faulthandler writes, the last call first and the main thread last:

    Thread 0x00007f8a (most recent call first):
      File "/lib/threading.py", line 320 in wait
      File "/lib/threading.py", line 1002 in _bootstrap

    Current thread 0x00007f8b (most recent call first):
      File "/src/mpctl/transport/shared.py", line 198 in _pause
      File "/src/mpctl/runtime/worker.py", line 70 in main
      File "<frozen runpy>", line 198 in _run_module_as_main
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

STACK_SIGNAL = signal.SIGUSR2
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
THREAD = re.compile(r"^(Current thread|Thread) 0x")
PACKAGE = "/mpctl/"


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
    """The main thread's calls, the last one first, from the last dump in the text of a log; empty
    where there is none."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if THREAD.match(line):
            threads.append([])
        elif threads and (match := FRAME.match(line)):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return tuple(threads[-1]) if threads else ()


def innermost(stack: tuple[Frame, ...]) -> str:
    """Where a stack is: the last call of mpctl's code, and what that code has called beyond it.

    `mpctl/runtime/batches.py:117 in _batch, in /lib/numpy/core.py:8 in stack`; empty for no stack.
    """
    if not stack:
        return ""
    inside = next((frame for frame in stack if PACKAGE in frame.file), None)
    if inside is None or inside is stack[0]:
        return str(stack[0])
    return f"{inside}, in {stack[0]}"
