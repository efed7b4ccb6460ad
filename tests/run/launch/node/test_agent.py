"""How a node agent reaches its launcher, and answers it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import BinaryIO

import pytest

from mpctl.records.rundir.directory import RunDir
from mpctl.run.hosts.network import own_addresses
from mpctl.run.launch.control.messages import (
    FROM_AGENT,
    HEAD,
    Command,
    Connection,
    Handshake,
    MessageKey,
    Request,
    encode,
    new_key,
    parse_head,
)
from mpctl.run.launch.node.agent import Agent, connect
from tests.run.launch.control.peers import serving

KEY = new_key()


@pytest.fixture
def port() -> Iterator[int]:
    with serving("n0", key=KEY) as server:
        yield server.port


def peer(addresses: str) -> str:
    with connect(addresses, KEY, 5).socket as opened:
        return str(opened.getpeername()[0])


def next_type(answers: BinaryIO, receiving: MessageKey) -> str:
    """The type of the next message of an agent."""
    length, mac = parse_head(answers.read(HEAD.size))
    body = answers.read(length)
    receiving.check(mac, body)
    return FROM_AGENT.validate_json(body).type


def test_the_first_address_that_answers_is_taken(port: int) -> None:
    assert peer(f"127.0.0.1:{port}") == "127.0.0.1"
    assert peer(f"127.0.0.2,[::1],127.0.0.1:{port}") == "127.0.0.1"


def test_the_host_that_ssh_came_from_is_known(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 50000 127.0.0.1 22")
    assert peer(f"@ssh,127.0.0.2:{port}") == "127.0.0.1"
    monkeypatch.delenv("SSH_CONNECTION")
    assert peer(f"@ssh,127.0.0.1:{port}") == "127.0.0.1"
    with pytest.raises(OSError, match="no address is known"):
        connect(f"@ssh:{port}", KEY)


def test_every_address_that_failed_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(OSError, match="refused") as error:
        connect(f"127.0.0.1,127.0.0.2:{port}", KEY)
    assert time.monotonic() - began < 5, "a launcher that has ended is not waited for"
    assert f"127.0.0.1 port {port}: " in str(error.value)
    assert f"127.0.0.2 port {port}: " in str(error.value)


def test_own_addresses_are_reachable_from_other_hosts() -> None:
    for address in map(ip_address, own_addresses()):
        assert not address.is_loopback
        assert not address.is_link_local


def test_an_agent_without_ranks_answers_pings_also_while_a_request_takes_long(tmp_path: Path) -> None:
    """The launcher considers a host lost after `launch.silence_seconds` without a message; before
    ranks start it may prepare data for longer than that."""
    near, far = socket.socketpair()
    handshake = Handshake(KEY, b"a" * 32, b"b" * 32)
    sending, receiving = handshake.messages_of("launcher"), handshake.messages_of("agent")
    with near, far:
        agent = Agent(RunDir(tmp_path), Connection(far, handshake))
        thread = threading.Thread(target=agent.serve)
        thread.start()
        module = {"module": "mpctl.run.doctor.pairs", "text": "no JSON", "seconds": 30}
        near.sendall(sending.seal(encode(Request(1, "run_module", module))))
        near.sendall(sending.seal(encode(Command("ping"))))
        near.settimeout(30)
        with near.makefile("rb") as answers:
            types = [next_type(answers, receiving) for _ in range(2)]
        near.sendall(sending.seal(encode(Command("bye"))))
        thread.join(5)
    assert types == ["pong", "result"]
    assert not thread.is_alive()
