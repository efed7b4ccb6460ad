"""The process of a worker: its log, its end together with its parent, and its failure record.

Two measured facts shape this file. torchrun killed by SIGKILL leaves its workers running, so a
worker asks the kernel to be killed with its parent. A rank that dies breaks its peers' connections
within a tenth of a second, so most failures are secondary: each record says whether it is one, and
the rank without a record is the one that was killed. What that rank was doing is in its breadcrumb
(mpctl/records/rundir/breadcrumb.py).
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpctl.core.durable import write_whole
from mpctl.core.errors import RunFailed
from mpctl.records.checkpoint.manifest import CheckpointDamaged
from mpctl.records.rundir.breadcrumb import STACK_SIGNAL
from mpctl.records.rundir.rank_files import LOST_PEER_TEXTS, FailureRecord

PR_SET_PDEATHSIG = 1
GLOO_THREAD = "pt_gloo_runloop"
"""Name of the threads in which torch's ProcessGroupGloo runs collectives."""


def die_with_parent(parent: int) -> None:
    """Have this process killed when process `parent`, which started it, ends, however that happens;
    at once when it has ended already, which left this process to another parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    else:

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(0.5)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Switch the cyclic garbage collector off inside of the block, which imports torch. Objects
    that exist at its end are never examined again (gc.freeze).

    Importing torch creates some 170,000 objects that stay. The collector would walk them several
    times: 0.1 to 0.2 s of the 1.3 s that the import takes, and 0.05 to 0.1 s at each full
    collection after it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def thread_names() -> list[str]:
    """Return the kernel's names of this process's threads, sorted, `?` for one that has just ended;
    empty without /proc."""
    names = []
    for task in Path("/proc/self/task").glob("*"):
        try:
            names.append((task / "comm").read_text("utf-8", "replace").strip())
        except OSError:
            names.append("?")
    return sorted(names)


def end_beside_gloo() -> None:
    """End this process with exit code 0 if a thread of a gloo process group is still alive: what
    Python does at its end is done, but the interpreter is left as it is.

    Such a thread lets go of the tensors of a collective after the caller's `wait` has returned,
    and needs the GIL for it. If it asks for it while the interpreter is being torn down, CPython
    before 3.14 ends the thread inside a C++ destructor, and C++ ends the process: SIGABRT,
    `terminate called without an active exception`. Destroying the groups does not help: whatever
    else refers to one (a DDP module) keeps its threads.
    """
    if GLOO_THREAD not in thread_names():
        return
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing's children do
    atexit._run_exitfuncs()
    gc.collect()
    for each in gc.get_objects():  # files that nobody has closed
        if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(ValueError, OSError):  # it is closed; its disk is full
                each.flush()
    os._exit(0)


def redirect_output(path: Path) -> None:
    """Append everything that this process prints from here on, native code included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def write_stacks_on_signal() -> None:
    """Write the Python stacks of all threads to the log whenever STACK_SIGNAL comes
    (records/rundir/breadcrumb.py); called after `redirect_output`."""
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)


def write_json(path: Path, document: object) -> None:
    """Write a JSON document; a crash leaves the file complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1) + "\n")


def failure_record(error: BaseException, *, rank: int, coords: dict[str, int], doing: str) -> FailureRecord:
    """The record of the error that ended a rank, with whether it is a secondary failure."""
    is_explained = isinstance(error, RunFailed)  # its message is a sentence
    words = str(error) if is_explained else f"{type(error).__name__}: {error}".strip()
    record: FailureRecord = {
        "rank": rank,
        "coords": coords,
        "doing": doing,
        "error": next(iter(words.splitlines()), type(error).__name__)[:500],
        "is_echo": is_secondary_failure(error),
        "time": time.time(),
        "traceback": traceback.format_exception(error)[-20:],
    }
    if (rollback := getattr(error, "rollback", None)) is not None:
        record["rollback"] = rollback
    if isinstance(error, CheckpointDamaged):
        record["damaged"] = str(error.folder)
    return record


def is_secondary_failure(error: BaseException) -> bool:
    """Whether an error only reports that another rank failed: an error of mpctl that says so, or an
    error of torch.distributed with such a message. From a disk or a GPU it is a cause."""
    if getattr(error, "is_secondary", False):
        return True
    words = str(error).lower()
    return _is_of_messages(error, words) and any(text in words for text in LOST_PEER_TEXTS)


def _is_of_messages(error: BaseException, words: str) -> bool:
    """Whether an error comes from torch.distributed (a DistError; gloo raises plain RuntimeErrors)
    and not from CUDA through it. Decided by the name of its module: torch may not be imported."""
    modules = {kind.__module__ for kind in type(error).__mro__}
    is_plain = type(error) is RuntimeError and ("gloo" in words or "nccl" in words)
    return ("torch.distributed" in modules or is_plain) and "cuda error" not in words
