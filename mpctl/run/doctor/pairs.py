"""Latency and bandwidth between hosts by plain TCP, which gloo uses: `python -m mpctl.run.doctor.pairs`
reads a PairRequest from stdin (JSON) and prints a PairReport.

Every host runs it at the same time. Each waits for the partners with a smaller index in the list
and connects to the others, in the order of its rounds; it measures with one partner at a time. A
host that holds its turn waits only for hosts with a larger index, so that no deadlock can arise.

Protocol of a connection (hosts/peers.py): the server answers GO when it has its turn. Then come
requests of 9 bytes, a letter and a size: `P` (ping: the answer is the other's clock), `S` (size bytes
follow; the answer is one byte when all have arrived), `R` (send size bytes), `E` (end). No content of
a message is used.
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time

from mpctl.run.doctor.documents import PairReport, PairRequest, PairResult, Transfer
from mpctl.run.hosts.modules import child_environment, end_with_parent
from mpctl.run.hosts.peers import GO, Partners, Peer

REQUEST = struct.Struct("!cQ")
CLOCK = struct.Struct("!d")
PINGS = 60
SIZES = (64 << 10, 1 << 20, 16 << 20)
LARGEST = 1 << 30
CONNECT_SECONDS = 3.0
SIZE_SECONDS = 0.25  # enough for a median, where a link is fast
LOOPBACK_SECONDS = 0.6
MOST_ROUNDS = 15


def measure_pairs(request: PairRequest) -> PairReport:
    """Serve the partners with a smaller index, measure with the others, return the results."""
    turn, began = threading.Lock(), time.monotonic()  # turn: held while this host measures with a partner

    def serve(link: socket.socket) -> None:
        link.settimeout(request.seconds + 30)
        with turn:
            link.sendall(GO)
            serve_requests(link)

    partners = Partners(request.me, request.partners, request.token, serve)

    def measure(other: int) -> PairResult:
        with turn:
            try:
                return _measured(partners, request, other, began + request.patience)
            except (OSError, EOFError) as error:
                peer = request.hosts[other]
                words = getattr(error, "strerror", None) or str(error) or type(error).__name__
                why = f"{peer.address} port {peer.port}: {words}"
                return PairResult(first=request.me, second=other, error=why)

    try:
        with partners.listening(request.hosts[request.me].port):
            results = [measure(other) for other in partners.larger]
            # With a limit, since a partner may have died.
            limit = request.patience + len(request.partners) * (request.seconds + 0.5)
            partners.all_came.wait(max(0.0, began + limit - time.monotonic()))
    except OSError as error:
        words = os.strerror(error.errno) if error.errno else str(error)
        why = f"port {request.hosts[request.me].port} of this host: {words}"
        results = [PairResult(first=request.me, second=other, error=why) for other in partners.larger]
    return PairReport(results=results)


def _measured(partners: Partners, request: PairRequest, other: int, patience: float) -> PairResult:
    """Connect to a partner and measure. patience: until when (time.monotonic) it may refuse."""
    began, link = partners.connect(request.hosts[other], CONNECT_SECONDS, patience)
    connect_seconds = time.perf_counter() - began
    with link:
        link.settimeout(request.patience + request.seconds * 20)
        if receive(link, 1) != GO:
            raise EOFError("the other side speaks another protocol")
        deadline = time.monotonic() + request.seconds
        latency, offset = ping(link)
        transfers = {kind: transfer_rates(link, kind, deadline) for kind in (b"S", b"R")}
        link.sendall(REQUEST.pack(b"E", 0))
    return PairResult(
        first=request.me,
        second=other,
        connect_seconds=connect_seconds,
        latency=latency,
        offset=offset,
        forward=transfers[b"S"],
        backward=transfers[b"R"],
    )


def ping(link: socket.socket) -> tuple[float, float]:
    """Half of the median round trip in seconds, and the other clock minus this one.

    The clocks are compared as NTP does it (RFC 5905, section 8), by the fastest round trip: the
    answer is assumed to have been written at its middle.
    """
    samples: list[tuple[float, float]] = []
    for _ in range(PINGS):
        sent, began = time.time(), time.perf_counter()
        link.sendall(REQUEST.pack(b"P", 0))
        (clock,) = CLOCK.unpack(receive(link, CLOCK.size))
        round_trip = time.perf_counter() - began
        samples.append((round_trip, clock - (sent + round_trip / 2)))
    return statistics.median(trip for trip, _ in samples) / 2, min(samples)[1]


def transfer_rates(link: socket.socket, kind: bytes, deadline: float) -> list[Transfer]:
    """The median rate for each size; a size that would take too long on this link is left out."""
    rates: list[Transfer] = []
    for number, size in enumerate(SIZES):
        share = (deadline - time.monotonic()) / (2 if kind == b"S" else 1) / (len(SIZES) - number)
        share = min(share, SIZE_SECONDS)
        if rates and size / rates[-1].rate > 2 * share:
            break
        ends, times = time.monotonic() + share, list[float]()
        while not times or (time.monotonic() + times[-1] < ends and len(times) < 50):
            times.append(timed_transfer(link, kind, size))
        rates.append(Transfer(size=size, rate=size / statistics.median(times)))
    return rates


def timed_transfer(link: socket.socket, kind: bytes, size: int) -> float:
    """Seconds to send `size` bytes until they are acknowledged (S), or to get them (R)."""
    began = time.perf_counter()
    link.sendall(REQUEST.pack(kind, size))
    if kind == b"S":
        send_zeros(link, size)
        receive(link, 1)
    else:
        discard(link, size)
    return time.perf_counter() - began


def serve_requests(link: socket.socket) -> None:
    """Answer a partner's requests until it ends."""
    while True:
        kind, size = REQUEST.unpack(receive(link, REQUEST.size))
        if kind == b"P":
            link.sendall(CLOCK.pack(time.time()))
        elif kind == b"S" and size <= LARGEST:
            discard(link, size)
            link.sendall(b"A")
        elif kind == b"R" and size <= LARGEST:
            send_zeros(link, size)
        else:
            return


def send_zeros(link: socket.socket, size: int) -> None:
    block = memoryview(bytes(min(size, 1 << 20)))
    while size:
        part = block[: min(size, len(block))]
        link.sendall(part)
        size -= len(part)


def discard(link: socket.socket, size: int) -> None:
    block = memoryview(bytearray(min(size, 1 << 20)))
    while size:
        count = link.recv_into(block[: min(size, len(block))])
        if not count:
            raise EOFError("the connection was closed in the middle of a message")
        size -= count


def receive(link: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises EOFError when the connection ends before."""
    content = bytearray()
    while len(content) < size:
        part = link.recv(size - len(content))
        if not part:
            raise EOFError("the connection was closed")
        content += part
    return bytes(content)


def measure_loopback() -> PairResult:
    """Two processes of this host over the loopback address; the second is started for this. Raises
    RuntimeError with the reason if that fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    # The first one listens on a port that is not used.
    hosts = [Peer(address="127.0.0.1", port=0), Peer(address="127.0.0.1", port=port)]
    token = secrets.token_hex(16)
    first, second = (
        PairRequest(me=me, hosts=hosts, partners=[1 - me], token=token, seconds=LOOPBACK_SECONDS) for me in (0, 1)
    )
    with subprocess.Popen(
        [sys.executable, "-m", "mpctl.run.doctor.pairs"],
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


def partners(host: int, hosts: int, most: int = MOST_ROUNDS) -> list[int]:
    """The hosts that a host is measured with, in order of rounds, at most so many.

    As in a tournament (the circle method): in each round a host meets one partner only, so that no
    two tests share its network card. n hosts, one more when n is odd, which pauses, need n - 1
    rounds until all have met. Fewer rounds are spread evenly over these.

    >>> [partners(host, 4) for host in range(4)]
    [[3, 2, 1], [2, 3, 0], [1, 0, 3], [0, 1, 2]]
    """
    circle = hosts + hosts % 2 - 1
    count, found = min(most, circle), []
    for turn in (number * circle // count for number in range(count)):
        # The last seat stays and meets `turn`; turn + i meets turn - i.
        other = turn if host == circle else circle if host == turn else (2 * turn - host) % circle
        if other < hosts and other != host:
            found.append(other)
    return found


def main() -> None:
    end_with_parent()
    report = measure_pairs(PairRequest.model_validate_json(sys.stdin.read()))
    print(report.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
