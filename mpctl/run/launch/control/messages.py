"""The protocol between the launcher and a node agent: how both prove who they are, what protects a
message, which messages there are, and the agent's end of a connection.

The launcher writes a key of 256 random bits into RUN/nodes, readable by its user alone. The key is
never sent. With a and b fresh challenges of 256 random bits, and HMAC always HMAC-SHA256:

    agent -> launcher    a
    launcher -> agent    b, HMAC(key, "mpctl launcher proof" a b)
    agent -> launcher    HMAC(key, "mpctl agent proof" a b)

The launcher proves itself first: an agent reveals nothing about its host to anybody else. The names
of the roles prevent an answer from being sent back to its sender, the challenges from being used
again. Each direction of the connection then has a key, HMAC(key, "mpctl launcher messages" a b) and
HMAC(key, "mpctl agent messages" a b), and message number n (0, 1, 2, ...) is sent as

    length of the body (4 bytes), HMAC(key of the direction, n (8 bytes) body), body

Both ends count, so that a message that was changed, repeated, left out or reordered on its way ends
the connection. Nothing is encrypted.

From the launcher come welcome, ping, start (a torchrun), end (it), stop (ask the ranks to save and
end), request (something else, by name) and bye; from an agent hello, report (NodeState of its
attempt), result (of a request) and pong. Each body is one JSON object with a `type`.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from mpctl.run.hosts.machine import HostFacts
from mpctl.run.launch.attempt import NodeState
from mpctl.run.launch.node.torchrun import NodeStart
from mpctl.spec.launch import SILENCE_SECONDS

PING_SECONDS = 2.0
Role = Literal["launcher", "agent"]
KEY_BYTES = CHALLENGE_BYTES = PROOF_BYTES = 32
ANSWER_BYTES = CHALLENGE_BYTES + PROOF_BYTES
"""Length of the launcher's answer to a challenge: its own challenge and its proof."""
HEAD = struct.Struct(f">I{PROOF_BYTES}s")
MESSAGE_BYTES, HELLO_BYTES = 1 << 24, 1 << 20
"""The longest body of a message, and of a hello."""


@checked(frozen=True)
class Hello:
    """First message of an agent. node: its index in the plan, None if the launcher knows it by the name of the host;
    local, remote: addresses of its end and the launcher's end."""

    name: str
    facts: HostFacts
    node: int | None
    local: str
    remote: str
    type: Literal["hello"] = "hello"


def outer_addresses(hellos: Sequence[Hello]) -> list[str]:
    """The address under which the other hosts reach each host: its end of the connection to the
    launcher. For the launcher's own host that is the loopback: then the address at which the other
    hosts reach the launcher."""
    remotes = (hello.remote for hello in hellos)
    outer = next((address for address in remotes if not ip_address(address).is_loopback), None)
    return [outer if outer and ip_address(hello.local).is_loopback else hello.local for hello in hellos]


@checked(frozen=True)
class Report:
    """Report of an agent on its share of attempt number `attempt`. clock: time on its host when it was made, seconds
    since 1970."""

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
    """Ask an agent for something by name (node/agent.py); it answers with a Result."""

    number: int
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    type: Literal["request"] = "request"


@checked(frozen=True)
class Welcome:
    """The launcher's first message. silence: seconds without a message after which either end
    considers the other lost; report_seconds: between two reports about ranks that run on."""

    silence: float = SILENCE_SECONDS
    report_seconds: float = 1.0
    type: Literal["welcome"] = "welcome"


@checked(frozen=True)
class Command:
    """A message without arguments. end: end the attempt's ranks; stop: have them finish their step,
    save and end; bye: the launch is over."""

    type: Literal["ping", "end", "stop", "bye"]


@checked(frozen=True)
class Pong:
    """An agent's answer to a ping, also while it has no ranks to report."""

    type: Literal["pong"] = "pong"


FromAgent = Hello | Report | Result | Pong
FromLauncher = Start | Request | Welcome | Command
BY_TYPE = Field(discriminator="type")
FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(Annotated[FromAgent, BY_TYPE])
FROM_LAUNCHER: TypeAdapter[FromLauncher] = TypeAdapter(Annotated[FromLauncher, BY_TYPE])
MESSAGES: TypeAdapter[FromAgent | FromLauncher] = TypeAdapter(Annotated[FromAgent | FromLauncher, BY_TYPE])


def encode(message: FromAgent | FromLauncher) -> bytes:
    return MESSAGES.dump_json(message)


class Connection:
    """The agent's end, once both ends have proved that they know the key. is_open: until the
    launcher closes it or a message arrives that the launcher cannot have sent; terms: what it
    says in its first message."""

    def __init__(self, opened: socket.socket, handshake: Handshake) -> None:
        self.socket, self.is_open = opened, True
        self.terms = Welcome()
        self.sent = handshake.messages_of("agent")
        self.received = handshake.messages_of("launcher")
        self.pending = bytearray()

    @classmethod
    def prove(cls, opened: socket.socket, key: bytes, seconds: float) -> Connection:
        """Go through the handshake on a new connection within so many seconds. Raises Unproved when
        the peer does not know the key, another OSError when it does not answer in time."""
        challenge, deadline = secrets.token_bytes(CHALLENGE_BYTES), time.monotonic() + seconds
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
            self.socket.settimeout(self.terms.silence)
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
                message = FROM_LAUNCHER.validate_json(body)
                if isinstance(message, Welcome):
                    self.terms = message
                messages.append(message)
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


class Unproved(OSError):
    """The peer did not prove that it knows the key, or a message was changed on its way."""


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def write_key(path: Path, key: bytes) -> None:
    """Write the key to a new file that only this user can read. Raises OSError."""
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(key.hex() + "\n", "ascii")


def read_key(path: Path) -> bytes:
    """The key that a file holds. Raises OSError when there is none or it cannot be read."""
    with path.open("rb") as file:
        text = file.read(2 * KEY_BYTES + 1).decode("ascii", errors="replace").strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} does not hold a key of {KEY_BYTES} bytes")
    return key


@dataclass(frozen=True)
class Handshake:
    """The secrets of one connection: the key of the launch, the agent's challenge a and the
    launcher's challenge b."""

    key: bytes
    agent: bytes
    launcher: bytes

    def proof(self, role: Role) -> bytes:
        """Return the proof of knowing the key that the end with this role sends."""
        return self._mac(f"mpctl {role} proof")

    def require(self, role: Role, proof: bytes) -> None:
        """Raises Unproved unless `proof` is that of the peer, which has this role."""
        if not hmac.compare_digest(proof, self.proof(role)):
            raise Unproved(f"the {role} does not know the key of this launch")

    def messages_of(self, role: Role) -> MessageKey:
        """Return the key that protects the messages of the end with this role."""
        return MessageKey(self._mac(f"mpctl {role} messages"))

    def _mac(self, purpose: str) -> bytes:
        return hmac.digest(self.key, purpose.encode() + self.agent + self.launcher, "sha256")


@dataclass
class MessageKey:
    """Protects the messages of one direction of a connection. count: messages so far."""

    key: bytes
    count: int = 0

    def seal(self, body: bytes) -> bytes:
        """The next message as it is sent."""
        return HEAD.pack(len(body), self._next_mac(body)) + body

    def check(self, mac: bytes, body: bytes) -> None:
        """Raises Unproved unless this is the next message that the peer sealed."""
        if not hmac.compare_digest(mac, self._next_mac(body)):
            raise Unproved("a message was changed on its way, repeated or left out")

    def _next_mac(self, body: bytes) -> bytes:
        number = self.count.to_bytes(8, "big")
        self.count += 1
        return hmac.digest(self.key, number + body, "sha256")


def parse_head(head: bytes, most: int = MESSAGE_BYTES) -> tuple[int, bytes]:
    """The length of a message's body and its HMAC, from its first HEAD.size bytes. Raises Unproved
    for one longer than `most`."""
    length, mac = HEAD.unpack(head)
    if length > most:
        raise Unproved(f"a message of {length:,} bytes, at most {most:,} are accepted")
    return length, mac
