"""Where the ranks of one host meet: a free TCP port of the loopback address 127.0.0.1.

Where the loopback interface is down, or no port is left for their connections, the ranks would wait
for minutes. Opening as many connections as they need shows that at once.
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
    """A port that nothing listens on now; another process may still take it before the ranks do.

    Raises RunFailed with address and reason when so many ranks could not meet there.
    """
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        try:
            listener.bind((HOST, 0))
            listener.listen(MOST_CONNECTIONS)
            listener.settimeout(5)
        except OSError as error:
            message = f"cannot listen at {HOST}, where ranks meet: {error.strerror}"
            raise RunFailed(f"{message}; {HINT}") from None
        port = int(listener.getsockname()[1])
        needed = min(2 * ranks + 2, MOST_CONNECTIONS)  # two for each rank, two for torchrun
        for number in range(needed):
            try:
                peer = opened.enter_context(socket.create_connection((HOST, port), timeout=5))
                # Accepted, since the queue of those that are not may be short: net.core.somaxconn
                opened.enter_context(listener.accept()[0])
                # Closed by a reset: the port it came from is free again at once.
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            except OSError as error:
                why = error.strerror or error
                opened_text = f"{number} of {needed} connections to {HOST}:{port}"
                message = f"only {opened_text}, where ranks meet, could be opened: {why}"
                raise RunFailed(f"{message}; {HINT}") from None
    return port
