"""RUN/stop-request: asks the launcher of a run to stop it, from any host that shares the directory.

`mpctl stop RUN` writes the file. The launcher looks for it twice a second and treats it as a
SIGTERM, an urgent one as two of them: the first makes the ranks finish their step and save, the
second ends them at once. A file of any other content, an empty one for instance, is a request that
is not urgent. A launcher that starts removes what an earlier one left.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict

from mpctl.durable import write_whole

STOP_SCHEMA: Literal["mpctl.stop/1"] = "mpctl.stop/1"


class StopRequest(TypedDict):
    """The content of the file. now: end the ranks at once, without saving; relayed: it passes on a
    signal that only one process of the launch received; host: of the process that wrote it; time:
    seconds since 1970."""

    schema: Literal["mpctl.stop/1"]
    now: bool
    relayed: bool
    host: str
    time: float


def write_stop_request(path: Path, *, now: bool, relayed: bool = False) -> None:
    """Ask for a stop. now: end the ranks at once, without saving; relayed: in place of a signal
    that the launcher may not have received. Raises OSError."""
    request: StopRequest = {
        "schema": STOP_SCHEMA,
        "now": now,
        "relayed": relayed,
        "host": platform.node(),
        "time": time.time(),
    }
    write_whole(path, json.dumps(request) + "\n")


def requested_signals(path: Path) -> int:
    """How many SIGTERMs the file stands for: 0 without a file, 1 to finish the step and save, 2 to
    end at once."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError:  # it exists
        return 1
    try:
        request = json.loads(content)
    except (ValueError, RecursionError):
        return 1
    return 2 if isinstance(request, dict) and request.get("now") is True else 1
