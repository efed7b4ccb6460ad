"""What the launcher may ask a node agent for, by name: each request is one function.

Requests are answered between two reports, so none may take long; what does (a probe) runs as a
process of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    """A TCP port at which nothing listens on this host now."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


REQUESTS: dict[str, Callable[..., Any]] = {"free_port": free_port}
"""The requests by name; arguments and results are JSON."""
