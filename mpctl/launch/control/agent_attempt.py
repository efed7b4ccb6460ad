"""One attempt on the hosts of node agents: started, watched and ended over their connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mpctl.errors import Issue
from mpctl.launch.attempt import AttemptState, NodeState
from mpctl.launch.control.messages import Word
from mpctl.launch.control.server import ControlServer, HostLink

POLL_SECONDS = 0.02
END_SECONDS = 15.0
STACKS_SECONDS = 2.0


@dataclass
class AgentAttempt:
    """torchrun on hosts of a cluster. links: of these hosts, in the order of nodes; address: where
    the ranks meet; failures: the nodes whose agent could not be started or has ended, and why."""

    server: ControlServer
    links: Sequence[HostLink]
    number: int
    address: str
    failures: Callable[[], dict[int, Issue]]

    def poll(self) -> int | None:
        """None while ranks run on any host; then AttemptState.code."""
        return self.look().code

    @property
    def has_failed(self) -> bool:
        """Whether a rank or a host has failed."""
        return self.look().has_failed

    def look(self) -> AttemptState:
        """What every host last reported."""
        return AttemptState([self._state(node, link) for node, link in enumerate(self.links)])

    def end(self) -> AttemptState:
        """Have every host end its ranks, and wait until all that answer have."""
        self.server.broadcast(Word("end"))
        deadline = time.monotonic() + END_SECONDS
        while (state := self.look()).code is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return state

    def stacks(self) -> dict[int, str]:
        """Where the ranks are that answer, on the hosts that answer."""
        answers = [self.server.request(link.node, "stacks") for link in self.links]
        deadline = time.monotonic() + STACKS_SECONDS
        stacks: dict[int, str] = {}
        for answer in answers:
            with suppress(RuntimeError, TimeoutError):
                of_host = answer.result(max(0.0, deadline - time.monotonic()))
                stacks |= {int(rank): str(text) for rank, text in of_host.items()}
        return stacks

    def _state(self, node: int, link: HostLink) -> NodeState:
        """What a host last reported; its failures at times of the launcher's clock."""
        state = link.reports.get(self.number, NodeState(node=node))
        shift = link.clock_shift
        failures = [failure | {"time": failure["time"] + shift} for failure in state.failures]
        return replace(state, host=link.name, lost=self._lost(link, state), failures=failures)

    def _lost(self, link: HostLink, state: NodeState) -> str:
        """A host whose ranks have ended is not lost to the attempt."""
        if state.code is not None:
            return ""
        failure = self.failures().get(link.node) if link.lost else None
        return f"{link.lost}: {failure.message}" if failure else link.lost
