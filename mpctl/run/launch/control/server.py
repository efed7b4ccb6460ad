"""The launcher's end of the control connections: a thread that serves every node agent.

The thread only moves messages: it stores the last hello and report of each host, the results of
requests, and when the host last sent anything. All other code of the launcher calls the methods of
ControlServer, from its own thread.

Whoever connects must prove at once that it knows the key of the launch (admission.py); nothing else
of it is read before. Of unproved connections at most as many as the launch has hosts, and SPARE
more, stay open. A peer that knows the key has HELLO_SECONDS to say hello.

Agents that heard no ping for `silence` seconds end themselves. If that is because this process did
not run, the hosts are lost for that reason, and no host is at fault.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from mpctl.run.hosts.machine import raise_file_limit
from mpctl.run.launch.attempt import LAUNCHER_ABSENT, NodeState, report_seconds
from mpctl.run.launch.control.admission import Admission
from mpctl.run.launch.control.messages import (
    FROM_AGENT,
    HEAD,
    HELLO_BYTES,
    MESSAGE_BYTES,
    PING_SECONDS,
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
    Unproved,
    Welcome,
    encode,
    new_key,
    parse_head,
)

HELLO_SECONDS, BUFFER_BYTES = 30.0, 1 << 16
SPARE, LEAST_SPARE, OTHER_FILES = 1024, 8, 128
"""Unproved connections beyond one a host, also where open files are few; open files of a launcher
for other things."""
CLOSE_SECONDS = 20.0
REASON_LINES, REASON_LENGTH = 3, 300
PORT_TRIES = 20
CLOCK_SAMPLES = 8
GONE = "its node agent ended"
SETTLE_SECONDS = 5.0
"""Time to learn, after this process was stopped, which agents have ended meanwhile."""
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Counts the time in which the machine sleeps, where the system has such a clock."""


@dataclass
class HostLink:
    """Record of the server about one host. hello: None until its agent has connected; lost: why the agent can no longer
    be reached, empty while it can; connected, heard: when it connected and when it was last heard, by time.monotonic();
    reports: the last state by attempt; delays: of the last reports, from when they were made by the host's clock to
    their arrival by this host's; writer, sealing: of the connection."""

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

    silence: seconds without a message after which either end considers the other lost; key: what a
    host must read in the run directory to take part, a new one when None; port: where agents
    connect; pinged: when the hosts were last pinged, by CLOCK; absence: why agents have ended that
    are found gone until `settled` (time.monotonic()).
    """

    def __init__(self, names: Sequence[str], silence: float = SILENCE_SECONDS, key: bytes | None = None) -> None:
        self.links = [HostLink(node, name) for node, name in enumerate(names)]
        self.silence = silence
        self.key = key or new_key()
        self.port = 0
        self.requests = 0
        self.loop = asyncio.new_event_loop()
        self.admission = Admission(self.loop, self.key, len(self.links) + SPARE, self._admit)
        self.connections = set[asyncio.Task[None]]()
        self.pinged = time.clock_gettime(CLOCK)
        self.absence, self.settled = "", float("-inf")
        self.thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self.started: Future[None] = Future()

    def open(self, addresses: Sequence[str] = ()) -> None:
        """Listen at these addresses of this host, at all of them by default, at a free port. Raises
        OSError when it cannot."""
        hosts = len(self.links)
        files = raise_file_limit(files_of_launcher(hosts) + SPARE)
        spare = min(SPARE, files - files_of_launcher(hosts))
        self.admission.most = hosts + max(spare, LEAST_SPARE)
        self.sockets = listen(addresses)
        self.port = self.sockets[0].getsockname()[1]
        self.thread.start()
        self.started.result()

    def close(self) -> None:
        """Notify all agents that the launch is over, and stop serving."""
        self.broadcast(Command("bye"))
        asyncio.run_coroutine_threadsafe(self._drain(), self.loop).result(CLOSE_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(CLOSE_SECONDS)

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
        request = Request(self.requests, name, arguments)
        self.loop.call_soon_threadsafe(self._ask, self.links[node], request, result)
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
        try:
            self.admission.open(self.sockets)
            ping = self.loop.create_task(self._ping())
        except BaseException as error:
            self.loop.close()
            self.started.set_exception(error)
            return
        self.started.set_result(None)
        self.loop.run_forever()
        self.admission.close(self.sockets)
        for task in (ping, *asyncio.all_tasks(self.loop)):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def _admit(self, opened: socket.socket, handshake: Handshake) -> None:
        """Serve a peer that knows the key."""
        connection = self.loop.create_task(self._agent(opened, handshake))
        self.connections.add(connection)
        connection.add_done_callback(self.connections.discard)

    async def _agent(self, opened: socket.socket, handshake: Handshake) -> None:
        """One connection, from its hello to its end."""
        link, why = None, GONE
        opening = handshake.messages_of("agent")
        reader, writer = await asyncio.open_connection(sock=opened, limit=BUFFER_BYTES)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await _next_message(reader, opening, HELLO_BYTES)
            link = self._welcome(hello, writer, handshake)
            while link is not None:
                self._receive(link, await _next_message(reader, opening, MESSAGE_BYTES))
        except (Unproved, ValueError) as error:
            why = f"a message from its node agent was refused: {_reason(error)}"
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # it was killed, says nothing, or the server is closed
        finally:
            if link and link.writer is writer:
                self._note_absence()
                absence = self.absence if time.monotonic() < self.settled else ""
                self._lose(link, absence or why)
            writer.close()

    def _welcome(self, hello: FromAgent, writer: asyncio.StreamWriter, handshake: Handshake) -> HostLink | None:
        """Answer a hello: its link, welcomed, or None for a peer that gets no node and is sent
        away."""
        sealing = handshake.messages_of("launcher")
        if not isinstance(hello, Hello) or (link := self._find(hello)) is None:
            writer.write(sealing.seal(encode(Command("bye"))))
            return None
        link.connected = link.heard = time.monotonic()
        link.writer, link.sealing = writer, sealing
        link.hello = hello
        self._write(link, Welcome(self.silence, report_seconds(len(self.links))))
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

    def _ask(self, link: HostLink, request: Request, result: Future[Any]) -> None:
        link.results[request.number] = result
        if link.lost:
            self._abandon(link)
        self._write(link, request)

    def _note_absence(self) -> None:
        """Note it if this process did not run for so long that the agents have ended; what hosts
        sent meanwhile was not read, so that none of them was silent."""
        now = time.clock_gettime(CLOCK)
        seconds = now - self.pinged
        if seconds <= self.silence:
            return
        self.pinged = now
        self.settled = time.monotonic() + SETTLE_SECONDS
        self.absence = (
            f"{LAUNCHER_ABSENT} for {seconds:.0f} s (it was stopped, its machine slept or had no "
            f"processor time for it), and hosts end their ranks after {self.silence:g} s without "
            "it (launch.silence_seconds)"
        )
        for link in self.links:
            link.heard = time.monotonic()

    async def _ping(self) -> None:
        while True:
            self._note_absence()
            self.pinged = time.clock_gettime(CLOCK)
            for link in self.links:
                try:
                    self._check(link)
                except Exception as error:  # of one link: the others are pinged all the same
                    about = {"message": f"no ping to {link.name}", "exception": error}
                    self.loop.call_exception_handler(about)
            await asyncio.sleep(PING_SECONDS)

    def _check(self, link: HostLink) -> None:
        """Ping a host, or find that it is lost."""
        self._write(link, Command("ping"))
        if link.is_ready and time.monotonic() - link.heard > self.silence:
            self._lose(link, f"it has not answered for {self.silence:g} s (launch.silence_seconds)")

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


def files_of_launcher(hosts: int) -> int:
    """Open files that a launcher of so many hosts needs: each host has a connection, and may have
    another one that is not yet proved."""
    return OTHER_FILES + 2 * hosts


def _reason(error: Exception) -> str:
    """Describe what is wrong with a message in one line."""
    lines = (line.strip() for line in str(error).splitlines())
    return ": ".join([line for line in lines if line][:REASON_LINES])[:REASON_LENGTH]


async def _next_message(reader: asyncio.StreamReader, opening: MessageKey, most: int) -> FromAgent:
    """The next message of an agent, of at most so many bytes. Raises Unproved for one that is
    longer or that it did not send, ValueError for one that is none, EOFError at the end of the
    connection."""
    length, mac = parse_head(await reader.readexactly(HEAD.size), most)
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
