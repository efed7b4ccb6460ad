"""The faults of `benchmarks.soak --hosts 2`: hosts that lose power, links that are cut and come
back, agents, ranks and launchers that are killed or stopped.

A fault hits the host of its rank; there is one rank on each.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Protocol

import psutil

from benchmarks.soak_faults import KINDS as LOCAL_KINDS
from benchmarks.soak_faults import Fault, Kind, Victim, while_saving
from tests.multinode.ssh_hosts import SshHosts

FROZEN = ("agent", "torchrun", "rank")
AWAY_SECONDS, SHORT_SECONDS = 15.0, 5.0
"""How long a link stays cut after the launcher has given its host up, which takes 20 s: longer than
an ssh tries; and how long one is cut without being noticed."""


class HostVictim(Victim, Protocol):
    """A run over hosts. hosts: all of them; on_host: a process on the host of a number, from 0."""

    hosts: SshHosts

    def on_host(self, kind: str, number: int) -> psutil.Process: ...


def _cut(run: HostVictim, fault: Fault) -> None:
    run.hosts.cut(list(run.hosts.hosts)[fault.rank])


def _mend_after(seconds: float) -> Callable[[HostVictim], None]:
    def mend(run: HostVictim) -> None:
        time.sleep(seconds)
        for name in run.hosts.hosts:
            run.hosts.mend(name)

    return mend


def _lose_power(run: HostVictim, fault: Fault) -> None:
    """The link is cut before the processes are killed, so that none of them can close its
    connections."""
    _cut(run, fault)
    run.hosts.stop(list(run.hosts.hosts)[fault.rank])


def _boot(run: HostVictim) -> None:
    for host in run.hosts.hosts.values():
        run.hosts.mend(host.name)
        if host.daemon is not None and not host.daemon.is_running:
            run.hosts.restart(host.name)


def _signal(kind: str, number: int = signal.SIGKILL) -> Callable[[HostVictim, Fault], None]:
    return lambda run, fault: run.on_host(kind, fault.rank).send_signal(number)


def _freeze(run: HostVictim, fault: Fault) -> None:
    for kind in FROZEN:
        run.on_host(kind, fault.rank).suspend()


def _thaw(run: HostVictim) -> None:
    for kind, number in product(FROZEN, range(len(run.hosts.hosts))):
        with suppress(StopIteration, KeyError, psutil.Error):
            run.on_host(kind, number).resume()


SHARED = (
    "rank-killed",
    "rank-stopped",
    "rank-killed-saving",
    "launcher-killed",
    "launcher-killed-saving",
    "launcher-terminated",
    "checkpoint-cut",
    "checkpoint-flipped",
    "record-cut",
)
"""Faults that are the same on one host."""

KINDS: dict[str, Kind] = {
    "host-lost": Kind("a host loses power, and is back when that was reported", _lose_power, mend=_boot),
    "host-lost-saving": Kind("a host loses power while saving", while_saving(_lose_power), mend=_boot),
    "link-cut": Kind("a link is cut until that was reported", _cut, mend=_mend_after(0)),
    "link-away": Kind("a link is cut, for 15 s longer", _cut, mend=_mend_after(AWAY_SECONDS)),
    "link-short": Kind("a link is cut for 5 s", _cut, mend=_mend_after(SHORT_SECONDS), is_harmless=True),
    "agent-killed": Kind("an agent, kill -9", _signal("agent")),
    "host-frozen": Kind("a host's processes, SIGSTOP until that was reported", _freeze, mend=_thaw),
    "torchrun-killed": Kind("torchrun of a host, kill -9", _signal("torchrun")),
    "rank-terminated": Kind("a rank, SIGTERM", _signal("rank", signal.SIGTERM)),
    **{name: LOCAL_KINDS[name] for name in SHARED},
}
