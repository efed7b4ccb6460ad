"""Runs torchrun so that it ends with the launcher: `python -m mpctl.train.runtime.torchrun FLAGS`.

With `--waiting RUN NICENESS` instead of flags it imports torch, with that niceness, then reads one
line of JSON from standard input: {"arguments": its flags, "env": variables to set, "log": the file
for its output, "fork": whether it may fork}. Without a line it ends.

With MPCTL_FORK in the environment it also imports what mpctl's worker does, and ranks are forked
from it (forking.py) where nothing speaks against that; otherwise, and where the program is another,
each rank is a new process, as torchrun starts it.

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
from collections.abc import Sequence
from pathlib import Path

from mpctl.records.rundir.breadcrumb import TORCHRUN, note_exit, rank_memory
from mpctl.train.runtime import worker
from mpctl.train.runtime.forking import ForkedRank, fork_ranks, import_rank_modules, obstacle, show_process
from mpctl.train.runtime.process import die_with_parent, garbage_collection_paused, redirect_output

WORKER = worker.__name__


def main() -> None:
    """Run torchrun with this process's arguments, until it ends or the launcher does."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    launcher = os.environ.pop("MPCTL_LAUNCHER", None)
    if launcher is not None:
        die_with_parent(int(launcher))
    os.environ[TORCHRUN] = str(os.getpid())
    may_fork, arguments = os.environ.pop("MPCTL_FORK", None) is not None, sys.argv[1:]
    is_waiting = arguments[:1] == ["--waiting"]
    with garbage_collection_paused():
        if may_fork:
            import_rank_modules(int(arguments[2]) if is_waiting else 0)
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
        from torch.distributed.run import main as torchrun

        from mpctl.train.runtime.forked_agent import run_forked
        from mpctl.train.runtime.store import create_rendezvous

    rendezvous_handler_registry.register("mpctl", create_rendezvous)
    if is_waiting:
        arguments, is_allowed = _read_order()
        may_fork = may_fork and is_allowed
    ranks = _fork(arguments) if may_fork else []
    terminated = Terminated()
    logging.getLogger(SignalException.__module__).addHandler(terminated)
    try:
        if ranks:
            run_forked(arguments, ranks)
        else:
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


def _fork(arguments: list[str]) -> list[ForkedRank]:
    """The ranks of these arguments as copies of this process; empty, with a line in the log, where
    they must be new processes."""
    from torch.distributed.run import parse_args

    from mpctl.train.runtime.forked_agent import unknown_torch

    given = parse_args(arguments)
    if given.training_script != WORKER:
        return []
    command = [sys.executable, "-m", "mpctl.train.runtime.torchrun", *arguments]
    reason = unknown_torch() or obstacle()
    if not reason and not show_process(command, os.environ):
        reason = "the kernel does not let a process say what its command line is"
    if reason:
        print(f"ranks are new processes and import torch again: {reason}", flush=True)
        return []
    return fork_ranks(int(given.nproc_per_node), _work)


def _work(words: Sequence[str]) -> None:
    """Be the worker of a rank with this command line."""
    sys.argv[:] = [str(worker.__file__), words[-1]]
    worker.main(Path(words[-1]))


class Terminated(logging.Handler):
    """The process ids of the ranks that torchrun logs to have sent a closing signal."""

    def __init__(self) -> None:
        super().__init__()
        self.pids: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Take the process id from `Sending process %s closing signal %s`."""
        if "closing signal" in str(record.msg) and isinstance(record.args, tuple):
            self.pids.update(pid for pid in record.args if isinstance(pid, int))


def _read_order() -> tuple[list[str], bool]:
    """The arguments from the line on standard input, and whether ranks may be forked; sets the
    variables and opens the log."""
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    order = json.loads(line)
    variables, log, arguments = (order[key] for key in ("env", "log", "arguments"))
    os.environ.update(variables)
    redirect_output(Path(log))
    return list(arguments), bool(order["fork"])


if __name__ == "__main__":
    main()
