"""An attempt over hosts whose clocks differ."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from mpctl.launch.attempt import NodeState
from mpctl.launch.control.agent_attempt import AgentAttempt
from mpctl.launch.control.messages import Connection, Report, encode, parse_from_agent
from mpctl.launch.control.server import ControlServer
from mpctl.rundir.rank_files import FailureRecord
from tests.launch.control.peers import agent, until


@pytest.fixture
def server() -> Iterator[ControlServer]:
    """A server for two hosts n0 and n1."""
    served = ControlServer(["n0", "n1"])
    served.open(addresses=["127.0.0.1"])
    try:
        yield served
    finally:
        served.close()


def failure(rank: int, at: float) -> FailureRecord:
    return {"rank": rank, "coords": {}, "doing": "step 3", "error": "ValueError: odd", "time": at,
            "is_echo": False, "traceback": []}  # fmt: skip


def report(connection: Connection, node: int, *, ahead: float, failed: float | None = None) -> None:
    """What an agent whose clock is so many seconds ahead says; failed: seconds ago."""
    now = time.time() + ahead
    failures = [] if failed is None else [failure(node, now - failed)]
    connection.send(Report(1, NodeState(node=node, failures=failures), clock=now))


def test_which_rank_failed_first_does_not_hang_on_the_clocks_of_hosts(
    server: ControlServer,
) -> None:
    """Rank 1 failed 2 s before rank 0, on a host whose clock is 5 s ahead: by the records alone it
    would be the second."""
    agents = [agent(server, node) for node in range(2)]
    assert until(lambda: all(link.is_ready for link in server.links))
    report(agents[0], 0, ahead=0.0, failed=1.0)
    report(agents[1], 1, ahead=5.0, failed=3.0)
    attempt = AgentAttempt(server, server.links, 1, "127.0.0.1:29500", dict)
    assert until(lambda: len(attempt.look().failures) == 2)
    failures = attempt.look().failures
    assert [record["rank"] for record in failures] == [1, 0]
    assert failures[1]["time"] - failures[0]["time"] == pytest.approx(2.0, abs=0.5)


def test_a_report_that_came_late_does_not_move_a_clock(server: ControlServer) -> None:
    """The report with the least delay counts, among the last ones."""
    connection, link = agent(server, 0), server.links[0]
    assert until(lambda: link.is_ready)
    report(connection, 0, ahead=-3.0)
    for late in (1.0, 4.0):  # on the way for so long
        report(connection, 0, ahead=-3.0 - late)
    assert until(lambda: len(link.delays) == 3)
    assert link.clock_shift == pytest.approx(3.0, abs=0.5)
    assert server.links[1].clock_shift == 0.0


def test_a_report_says_the_time_of_its_host() -> None:
    before = time.time()
    sent = parse_from_agent(encode(Report(1, NodeState())))
    assert isinstance(sent, Report) and before <= sent.clock <= time.time()
