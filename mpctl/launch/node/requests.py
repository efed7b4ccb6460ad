"""What the launcher may ask a node agent for, by name: each request is one function.

Each request is answered in a thread of its own, so that pings and reports go on meanwhile.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from mpctl.launch.node.modules import run_module


def free_port() -> int:
    """A TCP port at which nothing listens on this host now."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


Requests = Mapping[str, Callable[..., Any]]
REQUESTS: Requests = {
    "free_port": free_port,
    "run_module": run_module,
}
"""The requests by name; arguments and results are JSON."""
