"""Latency and bandwidth between two processes of one host, over TCP on the loopback address."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys

from mpctl.doctor.documents import PairResult
from mpctl.doctor.pairs import measure_pairs
from mpctl.doctor.requests import PairAddress, PairRequest
from mpctl.launch.node.processes import child_environment

SECONDS = 0.6


def measure_loopback() -> PairResult:
    """Measure with a second process, which is started for this. Raises RuntimeError with the reason
    where that fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    # The first one listens on a port that is not used.
    hosts = [PairAddress(host=name, address="127.0.0.1", port=port) for name in ("0", "1")]
    hosts[0] = PairAddress(host="0", address="127.0.0.1", port=0)
    token = secrets.token_hex(16)
    first, second = (
        PairRequest(me=me, hosts=hosts, partners=[1 - me], token=token, seconds=SECONDS)
        for me in (0, 1)
    )
    command = [sys.executable, "-m", "mpctl.doctor.pairs"]
    with subprocess.Popen(
        command,
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as peer:
        try:
            if peer.stdin is not None:
                peer.stdin.write(second.model_dump_json().encode())
                peer.stdin.close()
            (result,) = measure_pairs(first).results
        finally:
            peer.kill()
    if result.error:
        raise RuntimeError(result.error)
    return result
