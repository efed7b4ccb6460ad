"""The launcher's end of the control connections: a thread that serves every node agent.

The thread only moves messages: it stores the last hello and report of each host, the results of
requests, and when the host last sent anything. All other code of the launcher calls the methods of
ControlServer, from its own thread.

Whoever connects has HELLO_SECONDS to prove that it knows the key of the launch (messages.py) and
to say hello; nothing else of it is read before. Of unproved connections at most as many as the
launch has hosts, and SPARE more, stay open; then the oldest is closed. So strangers can neither
fill the memory nor lock out an agent, whose handshake takes milliseconds.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from mpctl.launch.attempt import NodeState
from mpctl.launch.control.messages import (
    CHALLENGE_BYTES,
    FROM_AGENT,
    HEAD,
    PING_SECONDS,
    PROOF_BYTES,
    SILENCE_SECONDS,
    Command,
    FromAgent,
    FromLauncher,
    Handshake,
    Hello,
    MessageKey,
    Report,
    Request,
    Result,
    encode,
    new_key,
    parse_head,
)

HELLO_SECONDS, SPARE, BUFFER_BYTES = 5.0, 8, 1 << 16
PORT_TRIES = 20
CLOCK_SAMPLES = 8
GONE = "its node agent ended"
SILENT = f"it has not answered for {SILENCE_SECONDS:g} s"


@dataclass
class HostLink:
    """What the server knows of one host. hello: None until its agent has connected; lost: why the
    agent can no longer be reached, empty while it can; connected, heard: when it connected and when
    it was last heard, by time.monotonic(); reports: the last state by attempt; delays: of the last
    reports, from the host's clock when they were made to this host's when they came; writer,
    sealing: of the connection."""

    node: int
    name: str
    hello: Hello | None = None
    lost: str = ""
    connected: float = 0.0
    heard: float = 0.0
    reports: dict[int, NodeState] = field(default_factory=dict)
    delays: deque[float] = field(default_factory=lambda: deque(maxlen=CLOCK_SAMPLES))
    results: dict[int, Future[Any]] = field(default_factory=dict)
    writer: asyncio.StreamWriter | None = None
    sealing: MessageKey | None = None

    @property
    def is_ready(self) -> bool:
        """Whether an agent is connected."""
        return self.hello is not None and not self.lost

    @property
    def clock_shift(self) -> float:
        """Seconds to be added to a time by the host's clock to have it by this one's: the least
        delay of the last reports, which waited least on the way (as the filter of NTP, RFC 5905,
        section 10)."""
        return min(self.delays, default=0.0)


class ControlServer:
    """Serves the agents of the hosts with these names, in the order of the plan's nodes.

    key: what a host must read in the run directory to take part; port: where agents connect.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.links = [HostLink(node, name) for node, name in enumerate(names)]
        self.key = new_key()
        self.port = 0
        self.requests = 0
        self.unproved: dict[asyncio.StreamWriter, None] = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self.started = threading.Event()

    def open(self, addresses: Sequence[str] = ()) -> None:
        """Listen at these addresses of this host, at all of them by default, at a free port."""
        self.sockets = listen(addresses)
        self.port = self.sockets[0].getsockname()[1]
        self.thread.start()
        self.started.wait()

    def close(self) -> None:
        """Notify all agents that the launch is over, and stop serving."""
        self.broadcast(Command("bye"))
        asyncio.run_coroutine_threadsafe(self._drain(), self.loop).result(SILENCE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(SILENCE_SECONDS)

    def send(self, node: int, message: FromLauncher) -> None:
        """Send a message to a host; a lost host does not get it."""
        self.loop.call_soon_threadsafe(self._write, self.links[node], message)

    def broadcast(self, message: FromLauncher) -> None:
        for link in self.links:
            self.send(link.node, message)

    def request(self, node: int, name: str, **arguments: Any) -> Future[Any]:
        """Send a request to a host (node/agent.py). The result raises RuntimeError with the host's
        error, or when the host is lost."""
        self.requests += 1
        result: Future[Any] = Future()
        link = self.links[node]
        link.results[self.requests] = result
        if link.lost:
            self._abandon(link)
        self.send(node, Request(self.requests, name, arguments))
        return result

    def dismiss(self, node: int, why: str) -> None:
        """Dismiss a host: its agent ends, and the host counts as lost."""
        self.send(node, Command("bye"))
        self.loop.call_soon_threadsafe(self._lose, self.links[node], why)

    def forget(self, node: int) -> None:
        """Let the agent of a host that was lost connect again."""
        link = self.links[node]
        link.hello, link.lost = None, ""

    # ------------------------------------------------------------ in the thread of the server

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        servers = [
            self.loop.run_until_complete(
                asyncio.start_server(self._agent, sock=opened, limit=BUFFER_BYTES)
            )
            for opened in self.sockets
        ]
        ping = self.loop.create_task(self._ping())
        self.started.set()
        self.loop.run_forever()
        for server in servers:
            server.close()
        for task in (ping, *asyncio.all_tasks(self.loop)):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    async def _agent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its handshake to its end."""
        link = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                self._make_room(writer)
                handshake = await self._prove(reader, writer)
                opening = handshake.messages_of("agent")
                link = self._welcome(await _next_message(reader, opening), writer, handshake)
            self.unproved.pop(writer, None)
            while link is not None:
                self._receive(link, await _next_message(reader, opening))
        except (ValueError, OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # not an agent, one that was killed, or the server is closed
        finally:
            self.unproved.pop(writer, None)
            if link and link.writer is writer:
                self._lose(link, GONE)
            writer.close()

    def _make_room(self, writer: asyncio.StreamWriter) -> None:
        """Count a new connection as unproved; close the oldest if there are too many."""
        self.unproved[writer] = None
        if len(self.unproved) > len(self.links) + SPARE:
            next(iter(self.unproved)).transport.abort()
            self.unproved.pop(next(iter(self.unproved)))

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Handshake:
        """Prove to an agent that this is the launcher, and have it prove itself. Raises Unproved
        when it does not."""
        challenge = await reader.readexactly(CHALLENGE_BYTES)
        handshake = Handshake(self.key, challenge, secrets.token_bytes(CHALLENGE_BYTES))
        writer.write(handshake.launcher + handshake.proof("launcher"))
        handshake.require("agent", await reader.readexactly(PROOF_BYTES))
        return handshake

    def _welcome(
        self, hello: FromAgent, writer: asyncio.StreamWriter, handshake: Handshake
    ) -> HostLink | None:
        if not isinstance(hello, Hello) or (link := self._find(hello)) is None:
            return None
        link.connected = link.heard = time.monotonic()
        link.writer, link.sealing = writer, handshake.messages_of("launcher")
        link.hello = hello
        return link

    def _find(self, hello: Hello) -> HostLink | None:
        """The link of a host, by its node or its name; None for one that is no host of the launch,
        is connected already, or was lost and not yet forgotten: its ranks are gone."""
        named = [link for link in self.links if hello.node in (None, link.node)]
        if hello.node is None:
            named = [link for link in named if link.name in (hello.name, hello.facts.name)]
        free = [link for link in named if link.hello is None]
        return next(iter(free), None)

    def _receive(self, link: HostLink, message: FromAgent) -> None:
        link.heard = time.monotonic()
        if isinstance(message, Report):
            link.reports[message.attempt] = message.state
            link.delays.append(time.time() - message.clock)
        elif isinstance(message, Result):
            result = link.results.pop(message.number, None)
            if result is None:
                return
            if message.error:
                result.set_exception(RuntimeError(message.error))
            else:
                result.set_result(message.value)

    def _write(self, link: HostLink, message: FromLauncher) -> None:
        if link.writer is not None and link.sealing is not None and not link.lost:
            link.writer.write(link.sealing.seal(encode(message)))

    async def _ping(self) -> None:
        while True:
            for link in self.links:
                self._write(link, Command("ping"))
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
            link.writer = link.sealing = None
        self._abandon(link)

    def _abandon(self, link: HostLink) -> None:
        """Answer the requests that a lost host will not answer."""
        while link.results:
            link.results.popitem()[1].set_exception(RuntimeError(link.lost))


async def _next_message(reader: asyncio.StreamReader, opening: MessageKey) -> FromAgent:
    """The next message of an agent. Raises Unproved for one that it did not send, ValueError for
    one that is none, EOFError at the end of the connection."""
    length, mac = parse_head(await reader.readexactly(HEAD.size))
    body = await reader.readexactly(length)
    opening.check(mac, body)
    return FROM_AGENT.validate_json(body)


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """A listening socket for each of these addresses of this host, all at one free port; one for
    all addresses if there are none. Raises OSError for an address of another host."""
    if not addresses:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return [socket.create_server(("", 0), family=family, dualstack_ipv6=dual)]
    for left in reversed(range(PORT_TRIES)):
        with ExitStack() as opened:
            try:
                sockets: list[socket.socket] = []
                for address in dict.fromkeys(addresses):
                    family = socket.AF_INET6 if ":" in address else socket.AF_INET
                    chosen = sockets[0].getsockname()[1] if sockets else 0
                    created = socket.create_server((address, chosen), family=family)
                    sockets.append(opened.enter_context(created))
                opened.pop_all()
                return sockets
            except OSError:  # the port that is free at one address may be taken at another
                if not left:
                    raise
    raise AssertionError
