"""One worker as a process: its log, its end with its parent, and what it leaves when it fails.

Three measured facts shape this file. torchrun killed by -9 leaves its workers running, so a worker
asks the kernel to be killed with its parent. A rank that dies breaks its peers' connections within
a tenth of a second, so most failures are echoes: each record says whether it is one, and a rank
that left no record at all is the one that died without a word. What it was doing then stands in its
trail (mpctl/rundir/breadcrumb.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from mpctl.durable import write_whole
from mpctl.errors import RunFailed

PR_SET_PDEATHSIG = 1
ECHOES = ("connection closed by peer", "connection reset", "broken pipe", "socket closed",
          "connection refused", "remote process exit", "application timeout",
          "unexpected exit of a remote peer", "connection closure by a peer",
          "nccl communicator was aborted", "wait timeout", "timed out",
          "gave up saving with its peers")  # fmt: skip


def die_with_parent(recorded: Path) -> None:
    """End this process when its parent ends, however that happens.

    recorded: where the launcher wrote who the parent is; one that ended while we were starting has
    left us to another, whose end would tell nothing.
    """
    die_with_process(int(recorded.read_text()) if recorded.exists() else os.getppid())


def die_with_process(parent: int) -> None:
    """End this process when `parent`, which started it, ends; at once when it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def redirect_output(path: Path) -> None:
    """Everything this process writes from here on, native code's words included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def write_json(path: Path, document: Any) -> None:
    """Whole or not at all, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1) + "\n")


def record_failure(
    path: Path, error: BaseException, *, rank: int, coords: dict[str, int], doing: str
) -> None:
    """What this rank knows of its end, for the supervisor to tell cause from echo."""
    is_told = isinstance(error, RunFailed)  # its words are whole sentences
    words = str(error) if is_told else f"{type(error).__name__}: {error}".strip()
    write_json(path, {
        "rank": rank, "coords": coords, "doing": doing, "error": words.splitlines()[0][:500],
        "is_echo": is_echo(error, words),
        "time": time.time(), "traceback": traceback.format_exception(error)[-20:],
    })  # fmt: skip


def is_echo(error: BaseException, words: str) -> bool:
    """Whether an error only says that another rank failed."""
    said = getattr(error, "is_echo", None)  # one that knows (runtime/nonfinite.py)
    return any(echo in words.lower() for echo in ECHOES) if said is None else bool(said)
