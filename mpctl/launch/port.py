"""A free TCP port of this host's loopback address, found by connecting to it.

torchrun and the ranks of one host meet at 127.0.0.1. Where it is down, or no port is left for their
connections, they would wait for minutes; a few connections of our own tell at once.
"""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack

from mpctl.errors import RunFailed

HOST = "127.0.0.1"
MOST_CONNECTIONS = 256
HINT = "check that the loopback interface is up and net.ipv4.ip_local_port_range leaves ports free"


def free_port(ranks: int = 1) -> int:
    """A port that nothing listens on now; another process may still take it first.

    Raises RunFailed with address and reason when `ranks` ranks could not meet there.
    """
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        try:
            listener.bind((HOST, 0))
            listener.listen(MOST_CONNECTIONS)
            listener.settimeout(5)
        except OSError as error:
            raise RunFailed(f"cannot listen at {HOST}, where ranks meet: {error.strerror}; {HINT}"
                            ) from None  # fmt: skip
        port = int(listener.getsockname()[1])
        needed = min(2 * ranks + 2, MOST_CONNECTIONS)  # two of each rank, two of torchrun
        for number in range(needed):
            try:
                peer = opened.enter_context(socket.create_connection((HOST, port), timeout=5))
                # Accepted, since the queue of those that are not may be short: net.core.somaxconn
                opened.enter_context(listener.accept()[0])
                # Closed by a reset: the port it came from is free again at once.
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            except OSError as error:
                why = error.strerror or error
                raise RunFailed(f"{number} of {needed} connections to {HOST}:{port}, where ranks "
                                f"meet, could be opened: {why}; {HINT}") from None  # fmt: skip
    return port
