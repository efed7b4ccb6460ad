"""Runs torchrun, to be ended with the launcher: `python -m mpctl.runtime.torchrun FLAGS`.

The flags are torchrun's own. Without MPCTL_LAUNCHER in the environment it is torchrun and nothing
else, so that the line that `mpctl launch --dry-run` prints can be run by hand.

SIGUSR1 is ignored here and in the ranks, which inherit it: schedulers send it to every process of a
job to ask for a checkpoint, and the launcher passes that on.
"""

from __future__ import annotations

import os
import signal
import sys

from mpctl.runtime.process import TORCHRUN, die_with_parent, garbage_collection_paused


def main() -> None:
    """Run torchrun with this process's arguments, until it ends or the launcher does."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    launcher = os.environ.pop("MPCTL_LAUNCHER", None)
    if launcher is not None:
        die_with_parent(int(launcher))
    os.environ[TORCHRUN] = str(os.getpid())
    with garbage_collection_paused():
        from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
