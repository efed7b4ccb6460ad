"""A control server and peers that are hostile or broken, before, during and after a launch."""

from __future__ import annotations

import errno
import re
import resource
import socket
import struct
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import pytest

from mpctl.run.launch.attempt import NodeState
from mpctl.run.launch.control import admission as admission_module
from mpctl.run.launch.control import server as server_module
from mpctl.run.launch.control.admission import Admission
from mpctl.run.launch.control.messages import ANSWER_BYTES, Command, Connection, MessageKey, Pong, Report, new_key
from mpctl.run.launch.control.server import ControlServer, HostLink
from mpctl.run.launch.node.agent import serve_launcher
from tests.run.launch.control.peers import (
    SECONDS,
    RecordingSocket,
    agent,
    hello,
    is_closed,
    is_seated,
    open_socket,
    serving,
    until,
)


def ready(server: ControlServer) -> list[int]:
    return [link.node for link in server.links if link.is_ready]


def test_an_agent_with_the_key_is_seated_and_answered(server: ControlServer) -> None:
    connection = agent(server, 1)
    assert until(lambda: ready(server) == [1])
    server.send(1, Command("end"))
    received: list[str] = []
    while "end" not in received:
        received += [message.type for message in connection.receive(20)]
    connection.send(Report(1, NodeState(node=1, code=3)))
    assert until(lambda: 1 in server.links[1].reports)
    assert server.links[1].reports[1].code == 3


def test_the_server_listens_only_at_its_addresses(server: ControlServer) -> None:
    assert [s.getsockname()[0] for s in server.sockets] == ["127.0.0.1"]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", server.port), timeout=5)


def test_several_addresses_share_a_port() -> None:
    sockets = server_module.listen(["127.0.0.1", "127.0.0.2", "127.0.0.1"])
    with ExitStack() as opened:
        names = [opened.enter_context(s).getsockname() for s in sockets]
    assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({name[1] for name in names}) == 1


def test_an_address_of_another_host_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        server_module.listen(["192.0.2.1"])


# ------------------------------------------------------------ before a host has come


def test_a_peer_with_another_key_gets_no_seat(server: ControlServer) -> None:
    opened = open_socket(server.port)
    with pytest.raises(OSError, match="the launcher does not know the key"):
        Connection.prove(opened, new_key(), 5)
    opened.sendall(bytes(32))
    assert is_closed(opened)
    assert ready(server) == []
    assert is_seated(server, 0)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: launcher\r\n\r\n" * 4,
        b"[" * 200_000,
        b'{"type":"hello","name":"n0","node":0}\n' * 3,
        bytes(range(256)) * 100,
    ],
)
def test_garbage_ends_its_connection_and_nothing_else(server: ControlServer, said: bytes) -> None:
    opened = open_socket(server.port)
    opened.sendall(said)
    assert is_closed(opened)
    assert is_seated(server, 0)


def test_a_flood_before_the_proof_takes_no_memory(server: ControlServer) -> None:
    """A peer that sends without end is read only as far as the handshake goes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ExitStack() as opened:
        for _ in range(10):
            peer = opened.enter_context(open_socket(server.port))
            peer.settimeout(0.2)
            with pytest.raises(OSError):  # its buffers are full, or the server has closed it
                for _ in range(16):
                    peer.sendall(b"x" * (1 << 20))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40_000, f"{grown} KiB more, of 160 MiB that were to be sent"


def test_hundreds_of_silent_connections_keep_no_agent_out(server: ControlServer) -> None:
    server.admission.most = 10
    with ExitStack() as opened:
        silent = [opened.enter_context(open_socket(server.port)) for _ in range(300)]
        first = agent(server, 0)
        assert until(lambda: ready(server) == [0])
        assert server.admission.count <= 10
        assert is_closed(silent[0])
        more = [opened.enter_context(open_socket(server.port)) for _ in range(50)]
        second = agent(server, 1)
        assert until(lambda: ready(server) == [0, 1])
        assert first.is_open and second.is_open and more


def test_a_source_with_few_connections_keeps_them(server: ControlServer) -> None:
    server.admission.most = 10
    with ExitStack() as opened:
        near = socket.create_connection(("127.0.0.1", server.port), SECONDS, source_address=("127.0.0.2", 0))
        opened.enter_context(near)
        flood = [opened.enter_context(open_socket(server.port)) for _ in range(100)]
        assert is_closed(flood[0]) and is_closed(flood[89])
        connection = Connection.prove(near, server.key, SECONDS)
        connection.send(hello(0))
        assert until(lambda: ready(server) == [0])


@dataclass
class Visitor:
    """An agent that leaves once it is welcome."""

    connection: Connection
    is_welcome: bool = False

    def serve(self) -> None:
        self.is_welcome = bool(self.connection.receive(SECONDS))


def test_a_flood_of_its_own_address_does_not_keep_an_agent_out(server: ControlServer) -> None:
    """Connections are opened without pause, and the oldest of them are closed with resets."""
    server.admission.most, is_over = 10, threading.Event()

    def flood() -> None:
        opened: deque[socket.socket] = deque()
        while not is_over.is_set():
            peer = socket.socket()
            peer.setblocking(False)
            peer.connect_ex(("127.0.0.1", server.port))
            opened.append(peer)
            if len(opened) > 100:
                opened.popleft().close()

    stranger = threading.Thread(target=flood)
    stranger.start()
    try:
        address = f"127.0.0.1:{server.port}"
        serve_launcher(Visitor, address, server.key, SECONDS, 0)
        assert server.links[0].hello is not None
    finally:
        is_over.set()
        stranger.join()


def test_a_launcher_out_of_files_lets_strangers_go_first(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = iter([OSError(errno.EMFILE, "Too many open files")] * 2)

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            for error in refused:
                raise error
            return super().accept()

    silent = [open_socket(server.port) for _ in range(2)]
    assert until(lambda: server.admission.count == 2)
    listener = Listener(fileno=server.sockets[0].detach())
    server.loop.call_soon_threadsafe(server.loop.remove_reader, listener.fileno())
    server.sockets[0] = listener
    server.loop.call_soon_threadsafe(server.admission.open, server.sockets)
    assert is_seated(server, 0)
    assert all(is_closed(peer) for peer in silent)


def test_an_address_that_cannot_be_served_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(admission: Admission, listeners: object) -> None:
        raise OSError("no more watches")

    monkeypatch.setattr(Admission, "open", refuse)
    with pytest.raises(OSError, match="no more watches"):
        ControlServer(["n0"]).open(["127.0.0.1"])


def test_a_silent_connection_is_closed_in_time(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "PROVE_SECONDS", 0.3)
    opened, begin = open_socket(server.port), time.monotonic()
    assert is_closed(opened)
    assert time.monotonic() - begin < 10
    half = open_socket(server.port)
    half.sendall(b"a" * 32)
    assert len(half.recv(ANSWER_BYTES)) == ANSWER_BYTES
    assert is_closed(half)


def test_a_proved_connection_without_a_hello_is_closed(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HELLO_SECONDS", 0.5)
    connection = Connection.prove(open_socket(server.port), server.key, 5)
    assert is_closed(connection.socket)
    other = Connection.prove(open_socket(server.port), server.key, 5)
    other.send(Pong())
    assert is_closed(other.socket)
    assert ready(server) == []


def test_a_recorded_connection_cannot_be_played_again(server: ControlServer) -> None:
    recording = RecordingSocket(open_socket(server.port))
    connection = Connection.prove(cast(socket.socket, recording), server.key, 5)
    connection.send(hello(0))
    assert until(lambda: ready(server) == [0])
    recording.opened.close()
    assert until(lambda: server.links[0].lost)
    server.forget(0)
    replayed = open_socket(server.port)
    for data in recording.sent:
        replayed.sendall(data)
    assert is_closed(replayed)
    assert ready(server) == []


def test_what_the_server_sends_does_not_contain_the_key(server: ControlServer) -> None:
    opened = open_socket(server.port)
    opened.sendall(b"a" * 32)
    answer = opened.recv(ANSWER_BYTES)
    assert server.key not in answer and server.key.hex().encode() not in answer


# ------------------------------------------------------------ while a host is there, and after it


def test_a_taken_seat_is_not_given_again(server: ControlServer) -> None:
    first = agent(server, 0)
    assert until(lambda: ready(server) == [0])
    second = agent(server, 0)
    assert is_closed(second.socket)
    server.send(0, Command("end"))
    received: list[str] = []
    while "end" not in received:
        received += [message.type for message in first.receive(20)]


def test_a_lost_host_stays_lost_until_the_launcher_asks_for_it(server: ControlServer) -> None:
    """Its ranks are gone: an agent that is back at once must not pass for the one before."""
    first = agent(server, 0)
    assert until(lambda: ready(server) == [0])
    first.socket.close()
    assert until(lambda: server.links[0].lost)
    early = agent(server, 0)
    assert is_closed(early.socket)
    assert server.links[0].lost
    server.forget(0)
    assert is_seated(server, 0)


def test_a_silent_host_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.02)
    with serving("n0", "n1", silence=0.5) as served:
        silent, talking = agent(served, 0), agent(served, 1)
        assert until(lambda: ready(served) == [0, 1])
        assert [m.type for m in silent.receive(SECONDS)][:1] == ["welcome"]
        assert silent.terms.silence == 0.5

        def is_lost() -> str:
            talking.send(Pong())
            return served.links[0].lost

        assert until(is_lost)
        reason = "it has not answered for 0.5 s (launch.silence_seconds)"
        assert served.links[0].lost == reason and ready(served) == [1]
        assert is_closed(silent.socket)


def stand_still(server: ControlServer, seconds: float) -> None:
    """Keep the thread of a server from running, as a stopped process does."""
    server.loop.call_soon_threadsafe(time.sleep, seconds)
    time.sleep(seconds)


def test_a_launcher_that_stood_still_says_so_of_the_hosts_that_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.02)
    with serving("n0", "n1", silence=0.5) as served:
        gone, patient = agent(served, 0), agent(served, 1)
        assert until(lambda: ready(served) == [0, 1])
        server_stands = threading.Thread(target=stand_still, args=(served, 1.0))
        server_stands.start()
        time.sleep(0.7)
        gone.socket.close()
        server_stands.join()
        assert until(lambda: served.links[0].lost)
        assert re.fullmatch(
            r"the launcher did not run for 1 s \(it was stopped, .*\), and hosts end their ranks "
            r"after 0\.5 s without it \(launch\.silence_seconds\)",
            served.links[0].lost,
        )
        patient.send(Pong())
        time.sleep(0.2)
        assert ready(served) == [1], "it said nothing while nobody read it"


def test_an_error_about_one_host_does_not_end_the_pings(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "PING_SECONDS", 0.02)
    connections = [agent(server, node) for node in range(2)]
    assert until(lambda: ready(server) == [0, 1])
    server.links[0].sealing = cast(MessageKey, object())
    received: list[str] = []
    while received.count("ping") < 3:
        received += [message.type for message in connections[1].receive(SECONDS)]
    assert "no ping to n0" in caplog.text


def test_a_request_to_a_lost_host_is_answered_in_the_thread_of_the_server(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, threads, abandon = agent(server, 0), set[str](), server._abandon
    assert until(lambda: ready(server) == [0])

    def note(link: HostLink) -> None:
        threads.add(threading.current_thread().name)
        abandon(link)

    monkeypatch.setattr(server, "_abandon", note)
    asked = server.request(0, "stacks")
    connection.socket.close()
    for answer in (asked, server.request(0, "stacks")):
        with pytest.raises(RuntimeError, match="its node agent ended"):
            answer.result(SECONDS)
    with pytest.raises(RuntimeError, match="its node agent ended"):
        server.request(0, "stacks").result(SECONDS)
    assert threads == {"control"}


REFUSED = {
    "body": "changed on its way, repeated or left out",
    "repeated": "changed on its way, repeated or left out",
    "left out": "changed on its way, repeated or left out",
    "too long": "a message of 2,147,483,648 bytes, at most 16,777,216 are accepted",
    "no message": "validation error",
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_message_that_was_changed_ends_the_connection(server: ControlServer, change: str) -> None:
    connection = agent(server, 0)
    assert until(lambda: ready(server) == [0])
    first = b'{"type":"kong"}' if change == "no message" else b'{"type":"pong"}'
    sealed = connection.sent.seal(first)
    following = connection.sent.seal(b'{"type":"pong"}')
    sent = {
        "body": sealed.replace(b"pong", b"PONG"),
        "repeated": sealed + sealed,
        "left out": following,
        "too long": struct.pack(">I", 1 << 31) + sealed[4:],
        "no message": sealed,
    }
    connection.socket.sendall(sent[change])
    assert until(lambda: server.links[0].lost)
    assert REFUSED[change] in server.links[0].lost
    assert is_closed(connection.socket)


def test_closing_prints_nothing_whatever_is_connected(capfd: pytest.CaptureFixture[str]) -> None:
    served = ControlServer(["n0"])
    served.open(addresses=["127.0.0.1"])
    with ExitStack() as opened:
        for _ in range(20):
            opened.enter_context(open_socket(served.port))
        half = opened.enter_context(open_socket(served.port))
        half.sendall(b"a" * 32)
        connection = agent(served, 0)
        assert until(lambda: ready(served) == [0])
        served.close()
        received: list[str] = []
        while connection.is_open:
            received += [message.type for message in connection.receive(20)]
    assert received[-1] == "bye"
    assert capfd.readouterr().err == ""
