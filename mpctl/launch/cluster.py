"""The hosts of a launch and an attempt on them: what the supervisor asks of a launcher backend.

A launch has one Cluster: the hosts, in the order of the plan's nodes. Each Attempt starts torchrun
anew on every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mpctl.errors import Issue
from mpctl.hosts.checks import Device
from mpctl.hosts.machine import HostFacts
from mpctl.launch.attempt import AttemptPhase, AttemptState
from mpctl.launch.launch_plan import LaunchPlan
from mpctl.planning.plan import Plan


class Attempt(Protocol):
    """torchrun on every host. address: where the ranks meet, `127.0.0.1:29500`."""

    address: str

    def poll(self) -> AttemptPhase:
        """How far the hosts are: starting, running, failing, succeeded or failed. Cheap enough for
        twenty calls a second."""

    def snapshot(self) -> AttemptState:
        """What is known of all ranks now."""

    def request_stop(self) -> None:
        """Have the ranks finish their step, save and end."""

    def stacks(self) -> dict[int, str]:
        """Have every rank write its Python stack to its log: where the main thread of each is,
        by rank (node/processes.py); without those that did not answer within STACK_SECONDS."""

    def end(self) -> AttemptState:
        """End what still runs, everywhere; the last state of all hosts."""


class Cluster(Protocol):
    """The hosts of a launch. hosts: their facts, by node of the plan."""

    @property
    def hosts(self) -> Sequence[HostFacts]:
        """What each host says of itself, in the order of the plan's nodes."""

    def check(self, plan: Plan, device: Device) -> list[Issue]:
        """Why these hosts cannot run the plan; empty when they can."""

    def recover(self, least: int, is_stopped: Callable[[], bool]) -> list[Issue]:
        """Before an attempt: get hosts back that were lost. Where at least `least` hosts can be
        used then, `hosts` are those and nothing is returned, else a reason for each that cannot.
        is_stopped: whether to give up, asked while it waits."""

    def has_returned(self) -> bool:
        """Whether a host that the attempt under way does without is there again. Cheap enough for
        twenty calls a second."""

    def start(self, plan: LaunchPlan) -> Attempt:
        """Start torchrun anew on every host. Raises RunFailed when the ranks cannot meet."""
