"""The messages between the launcher and a node agent, and the connection that carries them.

From the launcher: ping, start (a torchrun), end (it), stop (make RUN/stop), request (something
else, by name), bye. From an agent: hello, report (NodeState of its attempt), result (of a request),
pong. Each is one line of JSON with a `type`.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked

from mpctl.launch.attempt import NodeState
from mpctl.launch.node.facts import HostFacts
from mpctl.launch.node.torchrun import NodeStart

PING_SECONDS, SILENCE_SECONDS = 2.0, 20.0
LINE_BYTES = 1 << 24


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
    """What an agent knows of its share of attempt number `attempt`."""

    attempt: int
    state: NodeState
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
    """A message as a line."""
    return MESSAGES.dump_json(message) + b"\n"


@dataclass
class Connection:
    """The agent's end: sends and receives lines over a socket. is_open: until the peer closed."""

    socket: socket.socket
    pending: bytes = b""
    is_open: bool = True

    def send(self, message: FromAgent) -> None:
        """Send a message; a peer that is gone closes the connection."""
        try:
            self.socket.settimeout(SILENCE_SECONDS)
            self.socket.sendall(encode(message))
        except OSError:
            self.is_open = False

    def receive(self, seconds: float) -> list[FromLauncher]:
        """The messages that have come, after waiting at most so long for the first of them. A line
        that is no message closes the connection."""
        try:
            self.socket.settimeout(seconds)
            chunk = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            chunk = b""
        self.is_open = self.is_open and bool(chunk)
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        try:
            return [FROM_LAUNCHER.validate_json(line) for line in lines]
        except ValueError:
            self.is_open = False
            return []


def parse_from_agent(line: bytes) -> FromAgent:
    """A message of an agent. Raises ValueError when the line is none."""
    return FROM_AGENT.validate_json(line)
