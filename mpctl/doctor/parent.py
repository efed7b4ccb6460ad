"""Ending with the process that asked: nothing of a test outlives `mpctl doctor` or a node agent."""

from __future__ import annotations

import os
import threading
import time

from mpctl.launch.node.processes import PARENT

LOOK_SECONDS = 0.5


def end_with_parent() -> None:
    """Have this process end within a second of the process that started it, however that ends."""
    parent = int(os.environ.get(PARENT, os.getppid()))
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)
