"""The connections to the control server that have not yet proved that they know the launch's key.

Anybody who reaches the port can open some. Each has PROVE_SECONDS for the handshake (messages.py)
and costs the launcher one open file and at most 96 bytes that it sent. At most `most` of them stay
open. Then the source address with the most of them loses its oldest: a source with few keeps them,
however many another one opens.

One source may be both, a flood and an agent on the same host or behind the same NAT. Its agent is
served while its handshake, some milliseconds, is shorter than the flood needs to open `most`
connections; an agent whose connection is closed tries again (node/agent.py). So opening one must
cost the launcher less than it costs the stranger: accepted sockets are served by callbacks of the
loop, and get a stream and a task (server.py) only when they are proved.

By hand, with `most` 3: source a has opened 1 and 2, source b has opened 3. Connection 4 of a closes
1; connections 5 and 6 of b then close 2 and 3, since b has most of them at the second.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mpctl.run.launch.control.messages import CHALLENGE_BYTES, PROOF_BYTES, Handshake, Unproved

PROVE_SECONDS = 5.0
SWEEP_SECONDS, PAUSE_SECONDS = 0.5, 1.0
NO_FILES = (errno.EMFILE, errno.ENFILE)
ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before those that are open are served again."""
WAITING = 4096
"""Connections that the kernel holds until they are accepted; it lowers this to its own bound."""
OnProved = Callable[[socket.socket, Handshake], None]


@dataclass(eq=False)
class UnprovedPeer:
    """One connection during its handshake. deadline: by time.monotonic(); received: the part of its
    next message that has come; handshake: once its challenge was answered."""

    opened: socket.socket
    source: str
    deadline: float
    received: bytes = b""
    handshake: Handshake | None = None


@dataclass
class Admission:
    """Accepts connections and takes them through the handshake. most: that may be open unproved;
    on_proved: gets each that has proved itself; by_source: those that have not, oldest first."""

    loop: asyncio.AbstractEventLoop
    key: bytes
    most: int
    on_proved: OnProved
    by_source: dict[str, dict[UnprovedPeer, None]] = field(default_factory=dict)
    count: int = 0

    def open(self, listeners: Sequence[socket.socket]) -> None:
        """Accept connections at these sockets; called in the loop's thread."""
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(WAITING)
            self._listen(listener)
        self.loop.call_later(SWEEP_SECONDS, self._sweep)

    def close(self, listeners: Sequence[socket.socket]) -> None:
        """Stop accepting, and close what is unproved."""
        for listener in listeners:
            self.loop.remove_reader(listener)
            listener.close()
        for peers in [*self.by_source.values()]:
            for peer in [*peers]:
                self._drop(peer)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                opened, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in NO_FILES:
                    continue  # the peer has gone again
                if self.count == 0:
                    self._pause(listener)
                    return
                self._evict()
                continue
            opened.setblocking(False)
            source = source_of(str(address[0]))
            peer = UnprovedPeer(opened, source, time.monotonic() + PROVE_SECONDS)
            self.by_source.setdefault(source, {})[peer] = None
            self.count += 1
            self._read(peer)  # most have said something by now, or have gone
            if opened.fileno() >= 0:
                self.loop.add_reader(opened, self._read, peer)
            if self.count > self.most:
                self._evict()

    def _pause(self, listener: socket.socket) -> None:
        """Accept nothing for a while."""
        self.loop.remove_reader(listener)
        self.loop.call_later(PAUSE_SECONDS, self._listen, listener)

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self.loop.add_reader(listener, self._accept, listener)

    def _evict(self) -> None:
        """Close the oldest connection of the source that has most of them."""
        most = max(self.by_source.values(), key=len)
        self._drop(next(iter(most)))

    def _read(self, peer: UnprovedPeer) -> None:
        """Take in what has come of a peer's challenge or proof, and answer it."""
        wanted = CHALLENGE_BYTES if peer.handshake is None else PROOF_BYTES
        try:
            chunk = peer.opened.recv(wanted - len(peer.received))
            peer.received += chunk
            if not chunk:
                self._drop(peer)
            elif len(peer.received) == wanted:
                received, peer.received = peer.received, b""
                self._answer(peer, received)
        except BlockingIOError:
            pass
        except OSError:  # gone, or Unproved
            self._drop(peer)

    def _answer(self, peer: UnprovedPeer, received: bytes) -> None:
        """Prove to a peer that this is the launcher, or let it in. Raises Unproved when it does not
        know the key, another OSError when it takes no answer."""
        if peer.handshake is None:
            handshake = Handshake(self.key, received, secrets.token_bytes(CHALLENGE_BYTES))
            answer = handshake.launcher + handshake.proof("launcher")
            if peer.opened.send(answer) != len(answer):
                raise Unproved("the peer takes no answer")
            peer.handshake = handshake
            return
        peer.handshake.require("agent", received)
        self._forget(peer)
        self.on_proved(peer.opened, peer.handshake)

    def _sweep(self) -> None:
        """Close the connections that have timed out."""
        now = time.monotonic()
        for peers in [*self.by_source.values()]:
            while peers and (peer := next(iter(peers))).deadline < now:
                self._drop(peer)
        self.loop.call_later(SWEEP_SECONDS, self._sweep)

    def _drop(self, peer: UnprovedPeer) -> None:
        self._forget(peer)
        peer.opened.close()

    def _forget(self, peer: UnprovedPeer) -> None:
        self.loop.remove_reader(peer.opened)
        peers = self.by_source[peer.source]
        del peers[peer]
        if not peers:
            del self.by_source[peer.source]
        self.count -= 1


def source_of(address: str) -> str:
    """Whom the connections of an address count for: of IPv6, its network of 64 bits, all of which
    one host may use.

    >>> source_of("::ffff:10.0.0.7"), source_of("fe80::1:2%eth0")
    ('10.0.0.7', 'fe80:0:0:0')
    """
    address = address.partition("%")[0]
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address)
    if packed.startswith(bytes(10) + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return ":".join(f"{int.from_bytes(packed[at : at + 2], 'big'):x}" for at in range(0, 8, 2))
