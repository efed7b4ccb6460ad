"""Runs modules of mpctl as processes: a node agent for the launcher, doctor on its own host. Such a
process ends with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import TypedDict

MOST_OUTPUT = 8 << 20
PARENT = "MPCTL_PARENT"
"""Environment variable of such a process: the id of its parent."""
POLL_SECONDS = 0.5


class ModuleAnswer(TypedDict):
    """The output of a module. code: its exit code, None if it timed out."""

    code: int | None
    output: str
    errors: str


def child_environment() -> dict[str, str]:
    """The environment of a process that ends with this one."""
    return {**os.environ, "PYTHONSAFEPATH": "1", PARENT: str(os.getpid())}


def run_module(module: str, text: str, seconds: float) -> ModuleAnswer:
    """Run `python -m module` with `text` on its stdin; it is killed after `seconds`. Raises
    ValueError for a module that is not mpctl's."""
    if not module.startswith("mpctl."):
        raise ValueError(f"{module} is not a module of mpctl")
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=text,
            env=child_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"code": None, "output": "", "errors": f"no answer within {seconds:g} s"}
    output, errors = done.stdout[-MOST_OUTPUT:], done.stderr[-MOST_OUTPUT:]
    return {"code": done.returncode, "output": output, "errors": errors}


def end_with_parent() -> None:
    """Make this process end within a second of its parent, however the parent ends."""
    parent = int(os.environ.get(PARENT, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
