"""Hosts that measure each other: here threads and processes over the loopback address."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpctl.run.doctor.documents import PairRequest, PairResult
from mpctl.run.doctor.pairs import SIZES, measure_pairs, partners
from mpctl.run.hosts.peers import GREETING, Peer, digest


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 16])
def test_every_pair_meets_once_and_no_host_twice_in_a_round(hosts: int) -> None:
    for host in range(hosts):
        met = partners(host, hosts, most=hosts)
        assert sorted(met) == [other for other in range(hosts) if other != host]
        if hosts % 2 == 0:  # nobody pauses: the places in the lists are the rounds
            assert all(partners(other, hosts, most=hosts)[n] == host for n, other in enumerate(met))


def test_many_hosts_are_sampled_evenly() -> None:
    meetings = [partners(host, 1000, most=15) for host in range(1000)]
    assert {len(met) for met in meetings} == {15}
    assert all(host in meetings[other] for host, met in enumerate(meetings) for other in met)
    assert partners(3, 8) == partners(3, 8, most=7) and partners(0, 1) == []


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def measure(count: int, *, tokens: dict[int, str] | None = None, absent: int | None = None) -> list[PairResult]:
    """All pairs of `count` hosts, each a thread."""
    hosts = [Peer(address="127.0.0.1", port=port) for port in free_ports(count)]
    requests = [
        PairRequest(
            me=me,
            hosts=hosts,
            partners=partners(me, count),
            token=(tokens or {}).get(me, "secret"),
            seconds=0.2,
            patience=2.0,
        )
        for me in range(count)
        if me != absent
    ]
    with ThreadPoolExecutor(count) as pool:
        reports = pool.map(measure_pairs, requests)
        return [result for report in reports for result in report.results]


def test_three_hosts_measure_each_other() -> None:
    results = measure(3)
    assert sorted((r.first, r.second) for r in results) == [(0, 1), (0, 2), (1, 2)]
    for result in results:
        assert result.error is None
        assert result.latency is not None and 0 < result.latency < 5
        assert result.connect_seconds is not None and result.connect_seconds < 5
        assert result.offset is not None and abs(result.offset) < 5  # one clock, on a busy machine
        sizes = [transfer.size for transfer in result.forward]
        assert sizes == list(SIZES[: len(sizes)])
        assert result.rate is not None and result.rate > 1e6


def test_a_host_that_is_absent_is_named_and_delays_nobody_for_long() -> None:
    began = time.monotonic()
    results = {(r.first, r.second): r.error for r in measure(3, absent=2)}
    assert results[0, 1] is None
    assert "refused" in str(results[0, 2])
    assert "127.0.0.1 port" in str(results[1, 2])
    assert time.monotonic() - began < 20


def test_without_the_token_nothing_is_measured() -> None:
    (result,) = measure(2, tokens={0: "guessed"})
    assert result.error is not None and "closed" in result.error


def test_a_taken_port_is_a_result() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        hosts = [Peer(address="127.0.0.1", port=port)] * 2
        report = measure_pairs(PairRequest(me=0, hosts=hosts, partners=[1], token="x"))
    assert report.results[0].error == f"port {port} of this host: Address already in use"


def test_a_stranger_who_talks_nonsense_changes_nothing() -> None:
    (port, other) = free_ports(2)
    hosts = [Peer(address="127.0.0.1", port=other), Peer(address="127.0.0.1", port=port)]
    common = {"hosts": hosts, "token": "secret", "seconds": 0.2, "patience": 3.0}
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(measure_pairs, PairRequest(me=1, partners=[0], **common))
        for greeting in (b"GET / HTTP/1.1\r\n", GREETING.pack(digest("guessed"), 0)):
            with _connected(port) as stranger:
                stranger.sendall(greeting)
        report = measure_pairs(PairRequest(me=0, partners=[1], **common))
        assert second.result().results == []
    assert report.results[0].error is None


def _connected(port: int) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise AssertionError("nobody listens")
