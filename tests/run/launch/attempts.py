"""Attempts whose states a test sets, and breadcrumbs in memory of the test."""

from __future__ import annotations

from pathlib import Path

from mpctl.records.rundir.breadcrumb import RANK_BYTES, Breadcrumb, BreadcrumbState, read_breadcrumb
from mpctl.run.launch.attempt import AttemptPhase, AttemptState, NodeState, RankState
from mpctl.run.launch.status_file import StatusFile


def new_breadcrumb() -> Breadcrumb:
    """The breadcrumb of a rank that has just started."""
    return Breadcrumb(memoryview(bytearray(RANK_BYTES)))


def state_of(shared_state: Breadcrumb) -> BreadcrumbState:
    """What the agent of the rank's host reads."""
    return read_breadcrumb(bytes(shared_state.memory))


def report(run: Path, *states: BreadcrumbState, phase: AttemptPhase = AttemptPhase.RUNNING) -> None:
    """Write RUN/nodes/status.json as the launcher does whose ranks 0, 1, ... wrote this."""
    ranks = {rank: RankState("running", 0.0, state) for rank, state in enumerate(states)}
    status = StatusFile(run / "nodes" / "status.json")
    status.write(AttemptState([NodeState(ranks=ranks)]), phase)


class Saying:
    """A running attempt of one host whose ranks say these words."""

    address = "127.0.0.1:29500"
    is_asked = False

    def __init__(self, *words: str) -> None:
        ranks = {rank: RankState("running", 0.0, BreadcrumbState(text)) for rank, text in enumerate(words)}
        self.state = AttemptState([NodeState(host="n1", ranks=ranks)])

    def poll(self) -> AttemptPhase:
        return self.state.phase

    def snapshot(self) -> AttemptState:
        return self.state

    def request_stop(self) -> None:
        self.is_asked = True

    def end(self) -> AttemptState:
        return self.state
