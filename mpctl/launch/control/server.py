"""The launcher's end of the control connections: a thread that serves every node agent.

The thread does nothing but move messages: it keeps the last hello and report of each host, the
results of requests, and when it last heard of it. All other code of the launcher calls the methods
of ControlServer, from its own thread.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mpctl.launch.attempt import NodeState
from mpctl.launch.control.messages import (
    LINE_BYTES,
    PING_SECONDS,
    SILENCE_SECONDS,
    FromAgent,
    FromLauncher,
    Hello,
    Report,
    Request,
    Result,
    Word,
    encode,
    parse_from_agent,
)

GONE = "its node agent ended"
SILENT = f"it has not answered for {SILENCE_SECONDS:g} s"


@dataclass
class HostLink:
    """What the server knows of one host. hello: None until its agent has connected; lost: why the
    agent can no longer be reached, empty while it can; connected, heard: when it connected and when
    it was last heard, by time.monotonic(); reports: the last state by attempt."""

    node: int
    name: str
    hello: Hello | None = None
    lost: str = ""
    connected: float = 0.0
    heard: float = 0.0
    reports: dict[int, NodeState] = field(default_factory=dict)
    results: dict[int, Future[Any]] = field(default_factory=dict)
    writer: asyncio.StreamWriter | None = None

    @property
    def is_ready(self) -> bool:
        """Whether an agent is connected."""
        return self.hello is not None and not self.lost


class ControlServer:
    """Serves the agents of the hosts with these names, in the order of the plan's nodes.

    nonce: what a host must read in the run directory to take part; port: where agents connect.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.links = [HostLink(node, name) for node, name in enumerate(names)]
        self.nonce = secrets.token_hex(16)
        self.port = 0
        self.requests = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self.started = threading.Event()

    def open(self, port: int = 0) -> None:
        """Listen at all addresses of this host, at a free port unless one is given. Raises OSError
        when the port is taken."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self.socket = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        self.port = self.socket.getsockname()[1]
        self.thread.start()
        self.started.wait()

    def close(self) -> None:
        """Tell all agents that the launch is over, and stop serving."""
        for link in self.links:
            self.send(link.node, Word("bye"))
        asyncio.run_coroutine_threadsafe(self._drain(), self.loop).result(SILENCE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(SILENCE_SECONDS)

    def send(self, node: int, message: FromLauncher) -> None:
        """Send a message to a host; one that is lost does not get it."""
        self.loop.call_soon_threadsafe(self._write, self.links[node], message)

    def broadcast(self, message: FromLauncher) -> None:
        """Send a message to every host."""
        for link in self.links:
            self.send(link.node, message)

    def request(self, node: int, name: str, **arguments: Any) -> Future[Any]:
        """Ask a host for something (node/requests.py). The result raises RuntimeError with the
        host's words, or when the host is lost."""
        self.requests += 1
        result: Future[Any] = Future()
        link = self.links[node]
        link.results[self.requests] = result
        if link.lost:
            self._abandon(link)
        self.send(node, Request(self.requests, name, arguments))
        return result

    def forget(self, node: int) -> None:
        """Let the agent of a host that was lost connect again."""
        link = self.links[node]
        link.hello, link.lost = None, ""

    # ------------------------------------------------------------ in the thread of the server

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(
            asyncio.start_server(self._agent, sock=self.socket, limit=LINE_BYTES)
        )
        ping = self.loop.create_task(self._ping())
        self.started.set()
        self.loop.run_forever()
        server.close()
        for task in (ping, *asyncio.all_tasks(self.loop)):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    async def _agent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One agent, from its hello to the end of its connection."""
        link = None
        try:
            link = self._welcome(await reader.readline(), writer)
            while link and (line := await reader.readline()):
                self._receive(link, parse_from_agent(line))
        except (ValueError, OSError):
            pass  # not an agent, or one that was killed
        finally:
            if link and link.writer is writer:
                self._lose(link, GONE)
            writer.close()

    def _welcome(self, line: bytes, writer: asyncio.StreamWriter) -> HostLink | None:
        hello = parse_from_agent(line)
        link = self._find(hello) if isinstance(hello, Hello) else None
        if link is None or not isinstance(hello, Hello):
            return None
        link.connected = link.heard = time.monotonic()
        link.hello, link.lost, link.writer = hello, "", writer
        return link

    def _find(self, hello: Hello) -> HostLink | None:
        """The link of a host, by its node or its name; None for one that is no host of the launch
        or is connected already."""
        named = [link for link in self.links if hello.node in (None, link.node)]
        if hello.node is None:
            named = [link for link in named if link.name in (hello.name, hello.facts.name)]
        free = [link for link in named if not link.is_ready]
        return next(iter(free), None)

    def _receive(self, link: HostLink, message: FromAgent) -> None:
        link.heard = time.monotonic()
        if isinstance(message, Report):
            link.reports[message.attempt] = message.state
        elif isinstance(message, Result):
            result = link.results.pop(message.number, None)
            if result is None:
                return
            if message.error:
                result.set_exception(RuntimeError(message.error))
            else:
                result.set_result(message.value)

    def _write(self, link: HostLink, message: FromLauncher) -> None:
        if link.writer is not None and not link.lost:
            link.writer.write(encode(message))

    async def _ping(self) -> None:
        while True:
            for link in self.links:
                self._write(link, Word("ping"))
                if link.is_ready and time.monotonic() - link.heard > SILENCE_SECONDS:
                    self._lose(link, SILENT)
            await asyncio.sleep(PING_SECONDS)

    async def _drain(self) -> None:
        writers = [link.writer for link in self.links if link.writer and not link.lost]
        await asyncio.gather(*(writer.drain() for writer in writers), return_exceptions=True)
        for writer in writers:
            writer.close()

    def _lose(self, link: HostLink, why: str) -> None:
        link.lost = link.lost or why
        if link.writer is not None:
            link.writer.close()
            link.writer = None
        self._abandon(link)

    def _abandon(self, link: HostLink) -> None:
        """Answer the requests that a lost host will not answer."""
        while link.results:
            link.results.popitem()[1].set_exception(RuntimeError(link.lost))
