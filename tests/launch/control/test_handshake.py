"""The proofs of both ends of a control connection, and the protection of its messages."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mpctl.launch.control.handshake import (
    HEAD,
    MESSAGE_BYTES,
    Handshake,
    MessageKey,
    Unproved,
    new_key,
    parse_head,
    read_key,
    write_key,
)

KEY, A, B = bytes(range(32)), b"a" * 32, b"b" * 32


def hmac_by_hand(key: bytes, text: bytes) -> bytes:
    """RFC 2104 with SHA-256, whose blocks have 64 bytes."""
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(x ^ 0x36 for x in padded) + text).digest()
    return hashlib.sha256(bytes(x ^ 0x5C for x in padded) + inner).digest()


def test_a_proof_is_the_hmac_of_role_and_both_challenges() -> None:
    handshake = Handshake(KEY, A, B)
    assert handshake.proof("agent") == hmac_by_hand(KEY, b"mpctl agent proof" + A + B)
    assert handshake.proof("launcher") == hmac_by_hand(KEY, b"mpctl launcher proof" + A + B)
    handshake.require("agent", handshake.proof("agent"))


@pytest.mark.parametrize(
    "other", [Handshake(new_key(), A, B), Handshake(KEY, B, B), Handshake(KEY, A, A)]
)
def test_a_proof_for_another_key_or_challenge_is_refused(other: Handshake) -> None:
    with pytest.raises(Unproved, match="does not know the key"):
        Handshake(KEY, A, B).require("agent", other.proof("agent"))


def test_a_proof_sent_back_is_refused() -> None:
    """A peer without the key can only repeat what it was sent."""
    handshake = Handshake(KEY, A, B)
    with pytest.raises(Unproved):
        handshake.require("agent", handshake.proof("launcher"))


def sealed(*bodies: bytes) -> list[tuple[bytes, bytes]]:
    """Messages as they arrive: HMAC and body."""
    sender = MessageKey(KEY)
    sent = [sender.seal(body) for body in bodies]
    return [(parse_head(message[: HEAD.size])[1], message[HEAD.size :]) for message in sent]


def test_messages_are_accepted_once_and_in_their_order() -> None:
    first, second = sealed(b"one", b"two")
    receiver = MessageKey(KEY)
    receiver.check(*first)
    receiver.check(*second)
    for arrived in ([first, first], [second], [second, first], [(first[0], b"onE")]):
        receiver = MessageKey(KEY)
        with pytest.raises(Unproved, match="changed on its way, repeated or left out"):
            for message in arrived:
                receiver.check(*message)


def test_the_directions_have_different_keys() -> None:
    handshake = Handshake(KEY, A, B)
    keys = {handshake.messages_of("agent").key, handshake.messages_of("launcher").key}
    assert len(keys) == 2 and KEY not in keys


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
