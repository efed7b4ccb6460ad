"""Attempts whose states a test sets."""

from __future__ import annotations

from mpctl.launch.attempt import AttemptState, NodeState, RankState
from mpctl.rundir.breadcrumb import BreadcrumbState


class Saying:
    """A running attempt of one host whose ranks say these words."""

    address = "127.0.0.1:29500"
    has_failed = False

    def __init__(self, *words: str) -> None:
        ranks = {
            rank: RankState("running", 0.0, BreadcrumbState(text))
            for rank, text in enumerate(words)
        }
        self.state = AttemptState([NodeState(host="n1", ranks=ranks)])

    def poll(self) -> int | None:
        return self.state.code

    def look(self) -> AttemptState:
        return self.state

    def end(self) -> AttemptState:
        return self.state
