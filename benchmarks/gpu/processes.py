"""Processes that end together with all that they started.

A time-out of subprocess.run ends the child alone: ranks, compilers and servers that it started go
on and take the device from the next measurement. Here a child leads a session, and its process
group is ended as a whole. (Ranks of `mpctl launch` are in a session of torchrun's, which the kernel
ends together with its launcher.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(command: Sequence[str], seconds: float, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The finished process with its output. Raises subprocess.TimeoutExpired after `seconds`, with
    the output so far, when the process and all of its group are dead; CalledProcessError for an
    exit code other than 0, if `check`."""
    variables = child_environment()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, env=variables, start_new_session=True)
        try:
            code, is_late = child.wait(seconds), False
        except subprocess.TimeoutExpired:
            is_late = True
        finally:  # also what the child left behind, and on Ctrl-C
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        stdout, stderr = (_content(file) for file in (out, err))
    if is_late:
        raise subprocess.TimeoutExpired(command, seconds, stdout, stderr)
    done = subprocess.CompletedProcess(command, code, stdout, stderr)
    if check:
        done.check_returncode()
    return done


def child_environment() -> dict[str, str]:
    """This process's variables, with this repository in PYTHONPATH: what mpctl starts does not
    import from the current directory (PYTHONSAFEPATH), and the project may not be installed."""
    before = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [before, str(ROOT)]))}


def _content(file: tempfile._TemporaryFileWrapper[str]) -> str:
    file.seek(0)
    return file.read()


if __name__ == "__main__":  # SECONDS COMMAND ...: print its output; exit code 124 at the time-out
    try:
        print(run(sys.argv[2:], float(sys.argv[1])).stdout)
    except subprocess.TimeoutExpired as late:
        print(late.output)
        sys.exit(124)
