"""The port at which a launch answers Prometheus, whoever connects to it.

The server of prometheus_client has a thread and a file for each connection, and no deadline: a
process that opens idle ones can take all files of the launcher. Here one thread serves at most
MOST_CONNECTIONS, of which a further one closes the oldest; each has SECONDS for its whole request
and its answer, of which MOST_BYTES are read, and is closed after one answer.

    GET / or /metrics     200 with the page
    any other             404, 405 or 400
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

MOST_CONNECTIONS = 8
MOST_BYTES = 8192
SECONDS = 5.0
LOOPBACK = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format, version 0.0.4."""


@contextmanager
def answering(host: str, port: int, page: Callable[[], bytes]) -> Iterator[None]:
    """Answer with this page inside of the block. host: an address or a name of this host; empty for
    the loopback. Raises OSError where the port cannot be opened."""
    name = host.strip("[]") or LOOPBACK
    family, *_, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family, backlog=MOST_CONNECTIONS) as listening:
        server = _Server(page)
        thread = threading.Thread(target=server.run, args=(listening,), name="metrics", daemon=True)
        thread.start()
        server.started.wait()
        try:
            yield
        finally:
            server.loop.call_soon_threadsafe(server.loop.stop)
            thread.join(SECONDS)


@dataclass(eq=False)
class _Server:
    """The thread's side. connected: the oldest first; started: set once the loop runs."""

    page: Callable[[], bytes]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    connected: dict[asyncio.StreamWriter, None] = field(default_factory=dict)
    started: threading.Event = field(default_factory=threading.Event)

    def run(self, listening: socket.socket) -> None:
        asyncio.set_event_loop(self.loop)
        opening = asyncio.start_server(self._serve, sock=listening, limit=MOST_BYTES)
        server = self.loop.run_until_complete(opening)
        self.loop.call_soon(self.started.set)
        self.loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connected[writer] = None
        if len(self.connected) > MOST_CONNECTIONS:
            oldest = next(iter(self.connected))
            self.connected.pop(oldest)
            oldest.transport.abort()
        with suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(SECONDS):
                writer.write(self._answer(await _request(reader)))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        self.connected.pop(writer, None)
        writer.transport.abort()  # what is left of a reader that does not read

    def _answer(self, request: bytes) -> bytes:
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request")
        if words[0] != b"GET":
            return _response("405 Method Not Allowed")
        if words[1].partition(b"?")[0] not in (b"/", b"/metrics"):
            return _response("404 Not Found")
        try:
            return _response("200 OK", self.page())
        except OSError:  # the run directory cannot be read at this moment
            return _response("503 Service Unavailable")


async def _request(reader: asyncio.StreamReader) -> bytes:
    """The head of a request; empty for one that is too long."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return b""


def _response(status: str, body: bytes = b"") -> bytes:
    head = (f"HTTP/1.1 {status}", f"Content-Type: {CONTENT_TYPE}", f"Content-Length: {len(body)}", "Connection: close")
    return "\r\n".join((*head, "", "")).encode() + body
