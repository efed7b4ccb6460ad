"""A free port for the rendezvous, and the error where ranks cannot connect."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from mpctl.core.errors import RunFailed
from mpctl.run.hosts import network


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", network.free_port(8))) as server:
        assert server.getsockname()[0] == "127.0.0.1"


# In a separate network namespace: no loopback, then one whose ports run out.
_NAMESPACE = """
import sys
from mpctl.core.errors import RunFailed
from mpctl.run.hosts.network import free_port
try:
    free_port(4)
except RunFailed as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (":", "127.0.0.1:"),
        (
            "ip link set lo up && echo 40000 40000 > /proc/sys/net/ipv4/ip_local_port_range",
            "0 of 10 connections to 127.0.0.1:40000",
        ),
        (
            "ip link set lo up && echo 40000 40007 > /proc/sys/net/ipv4/ip_local_port_range",
            "of 10 connections to 127.0.0.1:4000",
        ),
    ],
)
def test_a_host_whose_ranks_cannot_meet(before: str, words: str) -> None:
    if os.geteuid() or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("needs a network namespace")
    command = ["unshare", "-n", "sh", "-c", f'{before}; exec "$0" -c "$1"', sys.executable, _NAMESPACE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert words in ended.stderr and "where ranks meet" in ended.stderr


def test_a_short_queue_of_connections_is_no_hindrance() -> None:
    """Linux before 5.4 lets 128 connections wait at a port, whatever is asked for."""
    if os.geteuid() or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("needs a network namespace")
    before = "ip link set lo up && echo 2 > /proc/sys/net/core/somaxconn"
    command = ["unshare", "-n", "sh", "-c", f'{before} && exec "$0" -c "$1"', sys.executable, _NAMESPACE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_a_refused_connection_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(network.socket, "create_connection", refuse)
    with pytest.raises(RunFailed, match="Cannot assign requested address"):
        network.free_port(1)
