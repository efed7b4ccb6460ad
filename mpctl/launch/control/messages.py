"""The messages between the launcher and a node agent, and the agent's end of the connection.

From the launcher: ping, start (a torchrun), end (it), stop (make RUN/stop), request (something
else, by name), bye. From an agent: hello, report (NodeState of its attempt), result (of a request),
pong. Each is one JSON object with a `type`; handshake.py says how it is sent.
"""

from __future__ import annotations

import socket
import time
from dataclasses import field
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked

from mpctl.launch.attempt import NodeState
from mpctl.launch.control.handshake import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    HEAD,
    Handshake,
    Unproved,
    new_challenge,
    parse_head,
)
from mpctl.launch.node.facts import HostFacts
from mpctl.launch.node.torchrun import NodeStart

PING_SECONDS, SILENCE_SECONDS = 2.0, 20.0


@checked(frozen=True)
class Hello:
    """An agent's first message. node: its index in the plan, None where the launcher knows it by
    the name of the host; local, remote: addresses of its end and the launcher's end."""

    name: str
    facts: HostFacts
    node: int | None
    local: str
    remote: str
    type: Literal["hello"] = "hello"


@checked(frozen=True)
class Report:
    """What an agent knows of its share of attempt number `attempt`. clock: the time on its host
    when it was made, seconds since 1970."""

    attempt: int
    state: NodeState
    clock: float = field(default_factory=time.time)
    type: Literal["report"] = "report"


@checked(frozen=True)
class Result:
    """The answer to a request by its number; error: why there is none, empty when there is."""

    number: int
    value: Any = None
    error: str = ""
    type: Literal["result"] = "result"


@checked(frozen=True)
class Start:
    """Start torchrun for an attempt."""

    attempt: int
    start: NodeStart
    type: Literal["start"] = "start"


@checked(frozen=True)
class Request:
    """Ask an agent for something by name (node/requests.py); it answers with a Result."""

    number: int
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    type: Literal["request"] = "request"


@checked(frozen=True)
class Word:
    """A message without content. end: end the attempt's ranks; stop: make RUN/stop; bye: the
    launch is over."""

    type: Literal["ping", "end", "stop", "bye"]


@checked(frozen=True)
class Pong:
    """An agent's answer to a ping: it is there, also while it has no ranks to report of."""

    type: Literal["pong"] = "pong"


FromAgent = Hello | Report | Result | Pong
FromLauncher = Start | Request | Word
FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(FromAgent)
FROM_LAUNCHER: TypeAdapter[FromLauncher] = TypeAdapter(FromLauncher)
MESSAGES: TypeAdapter[FromAgent | FromLauncher] = TypeAdapter(FromAgent | FromLauncher)


def encode(message: FromAgent | FromLauncher) -> bytes:
    """A message as JSON."""
    return MESSAGES.dump_json(message)


class Connection:
    """The agent's end: it has proved that it knows the key, and so has the launcher. is_open: until
    the launcher closed it or sent something that it cannot have sent."""

    def __init__(self, opened: socket.socket, handshake: Handshake) -> None:
        self.socket, self.is_open = opened, True
        self.sent = handshake.messages_of("agent")
        self.received = handshake.messages_of("launcher")
        self.pending = bytearray()

    @classmethod
    def prove(cls, opened: socket.socket, key: bytes, seconds: float) -> Connection:
        """Go through the handshake on a new connection within so many seconds. Raises Unproved when
        the peer does not know the key, another OSError when it does not answer in time."""
        challenge, deadline = new_challenge(), time.monotonic() + seconds
        opened.settimeout(seconds)
        opened.sendall(challenge)
        answer = _receive_exactly(opened, ANSWER_BYTES, deadline)
        handshake = Handshake(key, challenge, answer[:CHALLENGE_BYTES])
        handshake.require("launcher", answer[CHALLENGE_BYTES:])
        opened.sendall(handshake.proof("agent"))
        return cls(opened, handshake)

    def send(self, message: FromAgent) -> None:
        """Send a message; a peer that is gone closes the connection."""
        try:
            self.socket.settimeout(SILENCE_SECONDS)
            self.socket.sendall(self.sent.seal(encode(message)))
        except OSError:
            self.is_open = False

    def receive(self, seconds: float) -> list[FromLauncher]:
        """The messages that have come, after waiting at most so long for the first of them. One
        that the launcher did not send, or that cannot be read, closes the connection."""
        try:
            self.socket.settimeout(seconds)
            chunk = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            chunk = b""
        self.is_open = self.is_open and bool(chunk)
        self.pending += chunk
        messages = []
        try:
            while (body := self._next_body()) is not None:
                messages.append(FROM_LAUNCHER.validate_json(body))
        except (ValueError, Unproved):
            self.is_open = False
        return messages

    def _next_body(self) -> bytes | None:
        """The body of the next message; None until all of it has come."""
        if len(self.pending) < HEAD.size:
            return None
        length, mac = parse_head(bytes(self.pending[: HEAD.size]))
        end = HEAD.size + length
        if len(self.pending) < end:
            return None
        body = bytes(self.pending[HEAD.size : end])
        del self.pending[:end]
        self.received.check(mac, body)
        return body


def _receive_exactly(opened: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        opened.settimeout(max(deadline - time.monotonic(), 0.001))
        chunk = opened.recv(size - len(received))
        if not chunk:
            raise Unproved("the peer closed the connection before it proved itself")
        received += chunk
    return received


def parse_from_agent(body: bytes) -> FromAgent:
    """A message of an agent. Raises ValueError when it is none."""
    return FROM_AGENT.validate_json(body)
