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
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR2
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
THREAD = re.compile(r"^(Current thread|Thread) 0x")
PACKAGE = "/mpctl/"
STACK_SECONDS, LOOK_SECONDS = 1.0, 0.05
"""How long the ranks of a host may take to write their stacks, and how often it is looked."""

DUMP_BYTES = 1 << 18


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


class StackReader:
    """Reads what is appended to a log from now on, until a dump in it is complete."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.offset = log.stat().st_size if log.exists() else 0
        self.text = ""

    def is_complete(self) -> bool:
        """Whether a dump has come and nothing more since the last call."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(self.offset)
                text = stream.read(DUMP_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return False
        is_same, self.text = text == self.text, text
        return is_same and bool(main_stack(text))


def read_stacks(readers: Mapping[int, StackReader]) -> dict[int, str]:
    """Where each rank is (`innermost`), once all have answered or STACK_SECONDS have passed; ranks
    that have not answered are left out."""
    deadline, pending = time.monotonic() + STACK_SECONDS, list(readers.values())
    while time.monotonic() < deadline:
        pending = [reader for reader in pending if not reader.is_complete()]
        if not pending:
            break
        time.sleep(LOOK_SECONDS)
    where = {rank: innermost(main_stack(reader.text)) for rank, reader in readers.items()}
    return {rank: text for rank, text in where.items() if text}
