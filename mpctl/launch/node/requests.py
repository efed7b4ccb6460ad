"""What the launcher may ask a node agent for, by name: each request is one function.

Each request is answered in a thread of its own, so that pings and reports go on meanwhile.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from mpctl.launch.joined.place import describe_process
from mpctl.launch.node.modules import run_module


def free_port() -> int:
    """A TCP port at which nothing listens on this host now."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


REQUESTS: dict[str, Callable[..., Any]] = {
    "free_port": free_port,
    "joined_process": describe_process,
    "run_module": run_module,
}
"""The requests by name; arguments and results are JSON."""
