"""The port for Prometheus: what it answers, and what strangers can take of the launcher."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from mpctl.run.launch import metrics_port
from mpctl.run.launch.metrics_port import MOST_CONNECTIONS, answering
from tests.run.launch.test_monitoring import free_port

PAGE = b"mpctl_up 1.0\n"


@pytest.fixture
def port() -> Iterator[int]:
    number = free_port()
    with answering("", number, lambda: PAGE):
        yield number


@contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(count)]


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it, within 5 s."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def get(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_it_answers_get_alone(port: int) -> None:
    assert get(port) == get(port, "/") == get(port, "/metrics?name=a") == (200, PAGE)
    assert (get(port, "/x")[0], get(port, method="POST")[0]) == (404, 405)


def test_it_listens_at_the_loopback_unless_an_address_is_named(port: int) -> None:
    own = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert [address.ip for address in own if address.port == port] == ["127.0.0.1"]
    other = free_port()
    with answering("0.0.0.0", other, lambda: PAGE):
        assert get(other) == (200, PAGE)
    with pytest.raises(OSError), answering("", port, lambda: PAGE):
        pass


def test_idle_connections_take_neither_threads_nor_files(port: int) -> None:
    """Of 60, 8 are kept, and the next scrape is answered at once: the oldest makes room."""
    before = threading.active_count()
    with connections(port, 60) as opened:
        begin = time.monotonic()
        assert get(port) == (200, PAGE) and time.monotonic() - begin < 2
        assert threading.active_count() == before
        served = [c for c in psutil.Process().net_connections() if c.laddr.port == port]
        assert sum(c.status == "ESTABLISHED" for c in served) <= MOST_CONNECTIONS
        assert is_closed(opened[0])


def test_a_request_is_bounded_in_time_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port, "SECONDS", 0.3)
    with answering("", number := free_port(), lambda: PAGE), connections(number, 2) as (slow, long):
        slow.sendall(b"GET / HTTP/1.1\r\n")
        long.sendall(b"GET /" + b"a" * 20_000)
        begin = time.monotonic()
        assert long.recv(12) == b"HTTP/1.1 400"
        assert is_closed(slow) and time.monotonic() - begin < 3


def test_a_directory_that_cannot_be_read_is_no_end(tmp_path: Path) -> None:
    with answering("", number := free_port(), (tmp_path / "absent").read_bytes):
        assert get(number)[0] == get(number)[0] == 503
