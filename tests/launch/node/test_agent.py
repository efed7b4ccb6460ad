"""How a node agent reaches its launcher."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from mpctl.launch.node.agent import connect
from mpctl.launch.node.interface import own_addresses


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def peer(addresses: str) -> str:
    with connect(addresses, 5) as connection:
        return str(connection.getpeername()[0])


def test_the_first_address_that_answers_is_taken(port: int) -> None:
    assert peer(f"127.0.0.1:{port}") == "127.0.0.1"
    assert peer(f"127.0.0.2,[::1],127.0.0.1:{port}") == "127.0.0.1"


def test_the_host_that_ssh_came_from_is_known(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 50000 127.0.0.1 22")
    assert peer(f"@ssh,127.0.0.2:{port}") == "127.0.0.1"
    monkeypatch.delenv("SSH_CONNECTION")
    assert peer(f"@ssh,127.0.0.1:{port}") == "127.0.0.1"
    with pytest.raises(OSError, match="no address is known"):
        connect(f"@ssh:{port}")


def test_every_address_that_failed_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError, match="refused") as error:
        connect(f"127.0.0.1,127.0.0.2:{port}", 5)
    assert f"127.0.0.1 port {port}: " in str(error.value)
    assert f"127.0.0.2 port {port}: " in str(error.value)


def test_own_addresses_are_those_that_others_may_reach() -> None:
    for address in map(ip_address, own_addresses()):
        assert not address.is_loopback
        assert not address.is_link_local
