"""Start and end of the `mpctl` command, with settings for a fast start and exit.

Importing typer, pydantic and rich allocates some 150,000 objects that live until the end. Garbage
collection during the imports takes 6 % of `mpctl plan`, at exit 19 %, and looking for pydantic
plugins in every installed package 2 % (benchmarks/results/measurements.md).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

COLLECTIONS = (200_000, 50, 100)
"""Thresholds of the garbage collector, in place of 700, 10, 10. A launcher of 1,000 hosts, which
keeps what the last reports of them said, would spend 0.3 of a core on collections."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of this process, and exit with its exit code."""
    gc.set_threshold(*COLLECTIONS)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from mpctl.cli.app import run
    from mpctl.render.output import show_marks

    for stream in (sys.stdout, sys.stderr):
        show_marks(stream)

    if os.environ.get("_MPCTL_COMPLETE") == "complete_bash":
        from mpctl.cli.complete import complete_for_bash

        complete_for_bash(lambda: run(sys.argv[1:]))
        return
    code = run([*(sys.argv[1:] if arguments is None else arguments)])
    gc.freeze()
    sys.exit(code)
