"""Connections between the hosts of a check: each listens at a port for partners with a smaller number,
and connects to those with a larger one.

A connection begins with a digest of the check's token and the number of the host that opened it; the
answer is one byte. A stranger gets none, and nothing else is read of it.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from pydantic import Field

from mpctl.run.hosts.probes import ReportModel

GREETING, GO = struct.Struct("!32sI"), b"G"
GREETING_SECONDS = 3.0  # that a stranger may take
PAUSE_SECONDS = 0.1


class Peer(ReportModel):
    """Address of a host during a check."""

    address: str
    port: int = Field(ge=0, le=65_535)


class Partners:
    """This host's connections with its partners.

    me: its number; partners: theirs; serve: what it does with the connection of a partner that greeted
    it, in a thread of its own, GO included.
    """

    def __init__(self, me: int, partners: Collection[int], token: str, serve: Callable[[socket.socket], None]) -> None:
        self.me, self.digest, self.serve = me, digest(token), serve
        self.larger = [other for other in partners if other > me]
        self.awaited = {other for other in partners if other < me}
        self.all_came = threading.Event()
        if not self.awaited:
            self.all_came.set()

    @contextmanager
    def listening(self, port: int) -> Iterator[None]:
        """Accept partners in a thread. Raises OSError when the port is taken."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=dual) as server:
            threading.Thread(target=self._accept, args=(server,), daemon=True).start()
            yield
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts

    def connect(self, peer: Peer, seconds: float, deadline: float) -> tuple[float, socket.socket]:
        """Connect to a partner. Return the start of the successful attempt (time.perf_counter) and the greeted
        connection; GO is still to be read. A partner that refuses may not have started yet: it is tried again until
        `deadline` (time.monotonic). seconds: limit of an attempt."""
        while True:
            began = time.perf_counter()
            try:
                link = socket.create_connection((peer.address, peer.port), seconds)
            except ConnectionRefusedError:
                if time.monotonic() + PAUSE_SECONDS > deadline:
                    raise
                time.sleep(PAUSE_SECONDS)
                continue
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(GREETING.pack(self.digest, self.me))
            return began, link

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # the check has ended
            while True:
                link, _ = server.accept()
                threading.Thread(target=self._welcome, args=(link,), daemon=True).start()

    def _welcome(self, link: socket.socket) -> None:
        with link, suppress(OSError, EOFError, struct.error):
            link.settimeout(GREETING_SECONDS)
            secret, other = GREETING.unpack(link.recv(GREETING.size, socket.MSG_WAITALL))
            if not hmac.compare_digest(secret, self.digest):
                return
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self.serve(link)
            finally:
                self.awaited.discard(other)
                if not self.awaited:
                    self.all_came.set()


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
