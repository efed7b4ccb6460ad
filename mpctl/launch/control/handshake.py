"""How both ends of a control connection prove that they can read the run directory, and how every
message after that is protected.

The launcher writes a key of 256 random bits into RUN/nodes, readable by its user alone. The key is
never sent. With a and b fresh challenges of 256 random bits, and HMAC always HMAC-SHA256:

    agent -> launcher    a
    launcher -> agent    b, HMAC(key, "mpctl launcher proof" a b)
    agent -> launcher    HMAC(key, "mpctl agent proof" a b)

The launcher proves itself first: an agent says nothing about its host to somebody else. The names
of the roles keep an answer from being sent back to who gave it, the challenges from being used
again. Each direction of the connection then has a key, HMAC(key, "mpctl launcher messages" a b) and
HMAC(key, "mpctl agent messages" a b), and message number n (0, 1, 2, ...) is sent as

    length of the body (4 bytes), HMAC(key of the direction, n (8 bytes) body), body

Both ends count, so that a message that was changed, repeated, left out or reordered on its way ends
the connection. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["launcher", "agent"]
KEY_BYTES = CHALLENGE_BYTES = PROOF_BYTES = 32
ANSWER_BYTES = CHALLENGE_BYTES + PROOF_BYTES
"""What the launcher answers to a challenge: its own, and its proof."""
HEAD = struct.Struct(f">I{PROOF_BYTES}s")
MESSAGE_BYTES = 1 << 24
"""The longest body of a message."""


class Unproved(OSError):
    """The peer did not prove that it knows the key, or a message was changed on its way."""


def new_key() -> bytes:
    """A key for one launch."""
    return secrets.token_bytes(KEY_BYTES)


def new_challenge() -> bytes:
    """A challenge for one connection."""
    return secrets.token_bytes(CHALLENGE_BYTES)


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
        """What this end sends to prove that it knows the key."""
        return self._mac(f"mpctl {role} proof")

    def require(self, role: Role, proof: bytes) -> None:
        """Raises Unproved unless `proof` is that of the peer, which has this role."""
        if not hmac.compare_digest(proof, self.proof(role)):
            raise Unproved(f"the {role} does not know the key of this launch")

    def messages_of(self, role: Role) -> MessageKey:
        """What protects the messages that the end with this role sends."""
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


def parse_head(head: bytes) -> tuple[int, bytes]:
    """The length of a message's body and its HMAC, from its first HEAD.size bytes. Raises Unproved
    for one longer than MESSAGE_BYTES."""
    length, mac = HEAD.unpack(head)
    if length > MESSAGE_BYTES:
        raise Unproved(f"a message of {length:,} bytes, at most {MESSAGE_BYTES:,} are accepted")
    return length, mac
