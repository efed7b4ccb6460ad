"""Peers of a control server, made of bare sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from mpctl.run.hosts.machine import host_facts
from mpctl.run.launch.control.messages import Connection, Hello
from mpctl.run.launch.control.server import ControlServer

SECONDS = 20.0


@contextmanager
def serving(
    *names: str, address: str = "127.0.0.1", key: bytes | None = None, silence: float = 20.0
) -> Iterator[ControlServer]:
    """A server for hosts with these names. key: chosen by the server when None."""
    server = ControlServer(names, silence, key)
    server.open(addresses=[address])
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[ControlServer]:
    """A server for two hosts n0 and n1."""
    with serving("n0", "n1") as served:
        yield served


def open_socket(port: int) -> socket.socket:
    """A connection to a port of this host."""
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def agent(server: ControlServer, node: int, key: bytes | None = None) -> Connection:
    """An agent of a host that has said hello. Raises OSError when the server refuses its key."""
    connection = Connection.prove(open_socket(server.port), key or server.key, SECONDS)
    connection.send(hello(node))
    return connection


def is_seated(server: ControlServer, node: int) -> bool:
    """Whether an agent of a host can take its node; it leaves again."""
    connection = agent(server, node)
    seated = until(lambda: server.links[node].is_ready)
    connection.socket.close()
    return seated


def hello(node: int) -> Hello:
    """The hello of an agent of this host."""
    return Hello("here", host_facts(), node, "127.0.0.1", "127.0.0.1")


def until(condition: Callable[[], object]) -> bool:
    """Whether a condition comes true within SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def is_closed(opened: socket.socket, seconds: float = SECONDS) -> bool:
    """Whether the other end closes a connection within so many seconds, whatever it sends first."""
    opened.settimeout(seconds)
    try:
        while opened.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@dataclass
class RecordingSocket:
    """A socket that keeps what was sent through it."""

    opened: socket.socket
    sent: list[bytes] = field(default_factory=list)

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)
        self.opened.sendall(data)

    def recv(self, size: int) -> bytes:
        return self.opened.recv(size)

    def settimeout(self, seconds: float) -> None:
        self.opened.settimeout(seconds)
