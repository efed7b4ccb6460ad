"""The agent's end of a control connection, and launchers that are none.

The proofs of both ends of a control connection, and the protection of its messages.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from mpctl.records.rundir.directory import RunDir
from mpctl.run.launch.control.messages import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    HEAD,
    MESSAGE_BYTES,
    PROOF_BYTES,
    Command,
    Connection,
    Handshake,
    Start,
    Unproved,
    Welcome,
    encode,
    new_key,
    parse_head,
    read_key,
    write_key,
)
from mpctl.run.launch.control.server import ControlServer
from mpctl.run.launch.node.agent import Agent, connect, serve_launcher
from mpctl.run.launch.node.torchrun import RANK_VARIABLES, NodeStart
from tests.run.launch.control.peers import agent, serving, until

KEY = new_key()
EVIL = Start(1, NodeStart(0, 1, 1, "127.0.0.1", 1, {"PYTHONPATH": "/tmp/evil"}))
FORGED = Handshake(new_key(), b"", b"").messages_of("launcher").seal(encode(EVIL))


@contextmanager
def false_launcher(answer: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A server that sends the same bytes to each client: its port, and what it received."""
    heard: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                opened, _ = listener.accept()
            except OSError:
                return
            with opened:
                opened.settimeout(0.5)
                heard.append(opened.recv(1 << 16))
                opened.sendall(answer)
                try:
                    while data := opened.recv(1 << 16):
                        heard.append(data)
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield listener.getsockname()[1], heard
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@pytest.mark.parametrize(
    "answer",
    [b"", bytes(ANSWER_BYTES), bytes(ANSWER_BYTES) + FORGED, encode(EVIL) + b"\n", b"HTTP/1.1 200 OK\r\n\r\n" * 10],
)
def test_an_agent_sends_nothing_to_a_false_launcher(answer: bytes) -> None:
    """Neither the key nor a fact of its host: only a challenge."""
    with false_launcher(answer) as (port, heard), pytest.raises(OSError, match="port"):
        connect(f"127.0.0.1:{port}", KEY, 0.4)
    assert heard and {len(data) for data in heard} == {CHALLENGE_BYTES}
    assert KEY not in b"".join(heard)


def test_an_agent_tries_addresses_until_it_finds_the_launcher() -> None:
    with (
        serving("n0", address="127.0.0.2") as server,
        socket.create_server(("127.0.0.1", server.port)),  # a stranger at the first address
    ):
        found = connect(f"127.0.0.1,127.0.0.2:{server.port}", server.key, 0.5)
        assert found.socket.getpeername()[0] == "127.0.0.2"


def test_an_agent_that_is_turned_away_tries_again(tmp_path: Path) -> None:
    """A launcher closes connections while strangers open too many: with a reset, where something of
    them was not read; and it may not have read a proof that was sent."""
    answered: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def turn_away_twice() -> None:
            for _ in range(2):
                opened, _ = listener.accept()
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                opened.close()
            for is_last in (False, True):
                opened, _ = listener.accept()
                handshake = Handshake(KEY, opened.recv(CHALLENGE_BYTES), B)
                opened.sendall(B + handshake.proof("launcher"))
                handshake.require("agent", opened.recv(PROOF_BYTES))
                if is_last:
                    bye = encode(Command("bye"))
                    opened.sendall(handshake.messages_of("launcher").seal(bye))
                opened.close()
                answered.append(is_last)

        thread = threading.Thread(target=turn_away_twice)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        serve_launcher(partial(Agent, RunDir(tmp_path)), address, KEY, 30, 0)
        thread.join(30)
        assert answered == [False, True]


def test_a_launcher_that_is_silent_is_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    near, far = socket.socketpair()
    handshake = Handshake(KEY, A, B)
    sending = handshake.messages_of("launcher")
    with near, far:
        near.sendall(sending.seal(encode(Welcome(0.2))))
        Agent(RunDir(tmp_path), Connection(far, handshake)).serve()
    assert "silent for 0.2 s (launch.silence_seconds)" in capfd.readouterr().err


def test_a_go_between_can_neither_change_nor_add_messages(server: ControlServer) -> None:
    """It forwards the handshake unchanged, and then a forged message."""
    connection = agent(server, 0)
    assert until(lambda: server.links[0].is_ready)
    connection.pending += FORGED
    assert connection.receive(5) == [] and not connection.is_open


def test_messages_arrive_complete_however_they_were_cut(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    handshake = Handshake(KEY, b"a" * 32, b"b" * 32)
    sending, connection = handshake.messages_of("launcher"), Connection(far, handshake)
    with near, far:
        sent = sending.seal(encode(Command("ping"))) + sending.seal(encode(Command("bye")))
        received: list[str] = []
        for byte in sent:
            near.sendall(bytes([byte]))
            received += [message.type for message in connection.receive(5)]
    assert received == ["ping", "bye"]


def test_an_agent_starts_nothing_with_variables_that_no_launcher_sets(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    near, far = socket.socketpair()
    handshake = Handshake(KEY, b"a" * 32, b"b" * 32)
    sending = handshake.messages_of("launcher")
    started: list[NodeStart] = []

    def starter(run: RunDir, start: NodeStart) -> None:
        started.append(start)

    with near, far:
        serving = Agent(RunDir(tmp_path), Connection(far, handshake), starter)  # type: ignore[arg-type]
        near.sendall(sending.seal(encode(EVIL)) + sending.seal(encode(Command("bye"))))
        serving.serve()
        near.settimeout(5)
        report = json.loads(near.recv(1 << 16)[36:])
    assert started == []
    assert report["state"]["code"] == 1
    assert "PYTHONPATH" in capfd.readouterr().err


def test_variables_that_reach_the_loader_or_python_are_not_among_those_of_ranks() -> None:
    for name in ("PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "PYTHONSTARTUP"):
        assert name not in RANK_VARIABLES


def test_a_peer_that_drips_its_answer_times_out() -> None:
    near, far = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            near.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with near, far:
        with pytest.raises((TimeoutError, Unproved)):
            Connection.prove(far, KEY, 0.5)
        stop.set()
        thread.join(5)


FIXED_KEY, A, B = bytes(range(32)), b"a" * 32, b"b" * 32


def hmac_by_hand(key: bytes, text: bytes) -> bytes:
    """RFC 2104 with SHA-256, whose blocks have 64 bytes."""
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(x ^ 0x36 for x in padded) + text).digest()
    return hashlib.sha256(bytes(x ^ 0x5C for x in padded) + inner).digest()


def test_a_proof_is_the_hmac_of_role_and_both_challenges() -> None:
    handshake = Handshake(FIXED_KEY, A, B)
    assert handshake.proof("agent") == hmac_by_hand(FIXED_KEY, b"mpctl agent proof" + A + B)
    assert handshake.proof("launcher") == hmac_by_hand(FIXED_KEY, b"mpctl launcher proof" + A + B)
    handshake.require("agent", handshake.proof("agent"))


@pytest.mark.parametrize("other", [Handshake(new_key(), A, B), Handshake(FIXED_KEY, B, B), Handshake(FIXED_KEY, A, A)])
def test_a_proof_for_another_key_or_challenge_is_refused(other: Handshake) -> None:
    with pytest.raises(Unproved, match="does not know the key"):
        Handshake(FIXED_KEY, A, B).require("agent", other.proof("agent"))


def test_a_proof_sent_back_is_refused() -> None:
    """A peer without the key can only repeat what it received."""
    handshake = Handshake(FIXED_KEY, A, B)
    with pytest.raises(Unproved):
        handshake.require("agent", handshake.proof("launcher"))


def test_the_directions_have_different_keys() -> None:
    handshake = Handshake(FIXED_KEY, A, B)
    keys = {handshake.messages_of("agent").key, handshake.messages_of("launcher").key}
    assert len(keys) == 2 and FIXED_KEY not in keys


def test_a_message_that_is_too_long_is_refused_by_its_head() -> None:
    with pytest.raises(Unproved, match="16,777,217 bytes, at most 16,777,216"):
        parse_head(HEAD.pack(MESSAGE_BYTES + 1, bytes(32)))


def test_only_its_user_can_read_the_key(tmp_path: Path) -> None:
    path, key = tmp_path / "key", new_key()
    write_key(path, key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path) == key
    with pytest.raises(FileExistsError):
        write_key(path, key)


@pytest.mark.parametrize("text", ["", "00", "xy" * 32, "00" * 33])
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(OSError, match="does not hold a key of 32 bytes"):
        read_key(path)
