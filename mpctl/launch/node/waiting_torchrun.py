"""A torchrun that is started before it is known what it will run.

torchrun imports torch for more than a second before it starts a rank. Meanwhile the launcher checks
the job and writes the run directory: both take place at once when the process waits, ready, for its
arguments. It reads them as one line of JSON on its standard input, and ends when there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mpctl.launch.node.processes import kill_tree

LAUNCHER = "MPCTL_LAUNCHER"
"""Environment variable of torchrun: the process id of its parent, with which it ends."""
WAITING = "--waiting"


class WaitingTorchrun:
    """One such process, for a run directory; the path of that is in its command line, by which
    people and `mpctl runs` know it."""

    def __init__(self, run: Path) -> None:
        """Start it. Raises OSError when it cannot be started."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mpctl.runtime.torchrun", WAITING, str(run.resolve())],
            env={**os.environ, "PYTHONSAFEPATH": "1", LAUNCHER: str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def is_waiting(self) -> bool:
        """Whether it has not been told what to run."""
        return self.process.stdin is not None and not self.process.stdin.closed

    def order(self, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> bool:
        """Have it run torchrun with these arguments, its output appended to a log. False when it
        has ended already, whatever the reason: another one then shows why."""
        line = json.dumps({"arguments": list(arguments), "env": dict(env), "log": str(log)})
        if self.process.poll() is not None or self.process.stdin is None:
            return False
        try:
            with self.process.stdin as stdin:
                stdin.write(os.fsencode(line) + b"\n")
        except OSError:
            return False
        return True

    def end(self) -> None:
        """End it if it still waits."""
        if self.process.stdin is not None and self.is_waiting:
            with suppress(OSError):
                self.process.stdin.close()
            kill_tree(self.process)
