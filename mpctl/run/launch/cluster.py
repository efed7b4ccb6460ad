"""The hosts of a launch and an attempt on them: the interface of a backend to the supervisor.

A launch has one Cluster: the hosts, in the order of the plan's nodes. Each Attempt starts a new
torchrun on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mpctl.core.errors import Issue
from mpctl.plan.planning.plan import Plan
from mpctl.run.hosts.checks import Device
from mpctl.run.hosts.machine import HostFacts
from mpctl.run.launch.attempt import AttemptPhase, AttemptState
from mpctl.run.launch.launch_plan import LaunchPlan


class Attempt(Protocol):
    """torchrun on every host. address: the rendezvous of the ranks, `127.0.0.1:29500`."""

    address: str

    def poll(self) -> AttemptPhase:
        """The phase of the hosts: starting, running, failing, succeeded or failed. Cheap enough for
        twenty calls a second."""

    def snapshot(self) -> AttemptState:
        """The current state of all ranks."""

    def request_stop(self) -> None:
        """Have the ranks finish their step, save and end."""

    def stacks(self) -> dict[int, str]:
        """Have every rank write its Python stack to its log. Returns where the main thread of each
        is, by rank (node/processes.py), of those that answer within STACK_SECONDS."""

    def end(self) -> AttemptState:
        """End what still runs on any host; returns the last state of all hosts."""


class Cluster(Protocol):
    """The hosts of a launch. hosts: their facts, by node of the plan."""

    @property
    def hosts(self) -> Sequence[HostFacts]:
        """The facts that each host reports, in the order of the plan's nodes."""

    def check(self, plan: Plan, device: Device) -> list[Issue]:
        """Return the issues of running the plan on these hosts."""

    def blame(self, host: str, error: str) -> None:
        """Count a failure against the host on which its cause lies. error: its words."""

    def recover(self, least: int, is_stopped: Callable[[], bool]) -> list[Issue]:
        """Before an attempt: reconnect to lost hosts, replace lost and bad ones by spare hosts. If
        at least `least` hosts can then be used, these become `hosts` and [] is returned, else a
        reason for each that cannot. is_stopped: called while it waits, whether to give up."""

    def has_returned(self) -> bool:
        """Whether a host that the current attempt runs without has returned. Cheap enough for
        twenty calls a second."""

    def start(self, plan: LaunchPlan) -> Attempt:
        """Start a new torchrun on every host. Raises RunFailed when the ranks cannot connect."""
