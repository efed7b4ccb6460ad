"""Where the `mpctl` command starts: set for a fast start, then hand over.

Importing typer, pydantic and rich allocates some 150,000 objects that live until the end; looking
through them again and again for cycles is 6 % of `mpctl plan`, and scanning every installed
package for pydantic plugins another 2 % (medians of 15 pairs, docs/benchmarks.md).
"""

from __future__ import annotations

import gc
import io
import os
import sys


def main() -> None:
    gc.set_threshold(200_000, 50, 100)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows only ASCII shows a ?
            stream.reconfigure(errors="replace")
    from mpctl.cli.app import main as run

    run()
