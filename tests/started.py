"""A process that a test starts ends with the test's block, also where the test fails in it: `Popen` itself waits
for a process that nobody stops."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process; it and its children are killed where they still run when an error leaves the block."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        except BaseException:
            if process.poll() is None:
                own = psutil.Process(process.pid)
                for each in [*own.children(recursive=True), own]:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            raise
