"""Runs torchrun so that it ends with the launcher: `python -m mpctl.runtime.torchrun FLAGS`.

With `--waiting RUN` instead of flags it imports torch, then reads one line of JSON from standard
input: {"arguments": its flags, "env": variables to set, "log": the file for its output}. Without a
line it ends.

The flags are torchrun's own, and `--rdzv-backend=mpctl` is its static rendezvous with a store that
listens at the master address alone (store.py). Without MPCTL_LAUNCHER in the environment it needs
no launcher, so that the command that `mpctl launch --dry-run` prints can be run by hand.

The exit codes of ranks are written to the memory that they share with the agent of this host; if
the port at which they meet is taken, the exit code is EADDRINUSE.

SIGUSR1 is ignored here and in the ranks, which inherit it: schedulers send it to every process of a
job to ask for a checkpoint, and the launcher passes that on.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

from mpctl.rundir.breadcrumb import note_exit, rank_memory
from mpctl.runtime.process import (
    TORCHRUN,
    die_with_parent,
    garbage_collection_paused,
    redirect_output,
)


def main() -> None:
    """Run torchrun with this process's arguments, until it ends or the launcher does."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    launcher = os.environ.pop("MPCTL_LAUNCHER", None)
    if launcher is not None:
        die_with_parent(int(launcher))
    os.environ[TORCHRUN] = str(os.getpid())
    with garbage_collection_paused():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
        from torch.distributed.run import main as torchrun

        from mpctl.runtime.store import create_rendezvous

    rendezvous_handler_registry.register("mpctl", create_rendezvous)
    arguments = sys.argv[1:]
    if arguments[:1] == ["--waiting"]:
        arguments = _read_order()
    terminated = Terminated()
    logging.getLogger(SignalException.__module__).addHandler(terminated)
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            memory, is_terminated = rank_memory(rank, os.environ), failure.pid in terminated.pids
            note_exit(memory, failure.exitcode, is_terminated=is_terminated)
        raise
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        traceback.print_exc()
        sys.exit(errno.EADDRINUSE)
    except SignalException as error:  # it has ended its ranks; exit with the same signal
        signal.signal(error.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), error.sigval)


class Terminated(logging.Handler):
    """The process ids of the ranks that torchrun logs to have sent a closing signal."""

    def __init__(self) -> None:
        super().__init__()
        self.pids: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Take the process id from `Sending process %s closing signal %s`."""
        if "closing signal" in str(record.msg) and isinstance(record.args, tuple):
            self.pids.update(pid for pid in record.args if isinstance(pid, int))


def _read_order() -> list[str]:
    """The arguments from the line on standard input; sets the variables and opens the log."""
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    order = json.loads(line)
    variables, log, arguments = (order[key] for key in ("env", "log", "arguments"))
    os.environ.update(variables)
    redirect_output(Path(log))
    return list(arguments)


if __name__ == "__main__":
    main()
