"""The hosts of a launch checked between two attempts: all at once, in a second where all is well.

A host that does not answer, does not see or cannot write the run directory, whose GPUs report
errors, or that lacks what the plan needs is left out where another can take its place. So is one of
two hosts that cannot connect to each other: of all such pairs the host that is part of most of them
first. What all hosts have in common, such as a full disk of the shared run directory, is no reason
to leave one out.

Up to MOST_PAIRS hosts every pair is tried; of more, each host with those that are 1, 2, 4, 8, ...
places behind it, around the list, so that a host has as many partners on its way in as out.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpctl.core.errors import Issue
from mpctl.run.hosts.health import HealthReport, HealthRequest
from mpctl.run.hosts.peers import Peer
from mpctl.run.hosts.probes import HostAnswer, NoAnswer
from mpctl.run.launch.control.messages import Hello, outer_addresses
from mpctl.run.launch.control.server import ControlServer, HostLink

MODULE = "mpctl.run.hosts.health"
PORT_SECONDS, PROBE_SECONDS, GPU_SECONDS, START_SECONDS = 3.0, 5.0, 15.0, 5.0
"""Time limits for hosts to name a port, for each probe (with GPUs: their driver may have to load again), and to start
the process that probes."""
POLL_SECONDS = 0.02
LAST_PORT = 65_535
MOST_PAIRS = 16
MOST_SKEW = 1.0
HINT = "mend the host, or leave it out"


@dataclass(frozen=True)
class Health:
    """Result of a health check of all hosts. bad: why hosts should not be used, by number; notes: other messages for
    people; reports: of the hosts that have answered, by number."""

    bad: Mapping[int, Issue] = field(default_factory=dict)
    notes: Sequence[str] = ()
    reports: Mapping[int, HealthReport] = field(default_factory=dict)


def check_hosts(
    server: ControlServer, links: Sequence[HostLink], key: Path, *, needs_gpus: bool, is_stopped: Callable[[], bool]
) -> Health:
    """Check connected hosts. key: the file of the launch's key."""
    seconds = GPU_SECONDS if needs_gpus else PROBE_SECONDS
    hellos = {link.node: link.hello for link in links if link.hello is not None}
    hosts = [link for link in links if link.node in hellos]
    sent = time.time()
    asked = _ask(server, hosts, hellos, key, seconds, needs_gpus=needs_gpus)
    answers = _collect(asked, seconds + START_SECONDS, is_stopped)
    if is_stopped():
        return Health()
    reports: dict[int, HealthReport] = {}
    bad: dict[int, Issue] = {}
    for link in hosts:
        try:
            reports[link.node] = HostAnswer.of(answers[link.node], sent).read(HealthReport)
        except NoAnswer as error:
            bad[link.node] = Issue("host-silent", link.name, f"health check: {error}", HINT)
    names = {link.node: link.name for link in hosts}
    return judged(names, reports, bad, sent=sent)


def _ask(
    server: ControlServer,
    hosts: Sequence[HostLink],
    hellos: Mapping[int, Hello],
    key: Path,
    seconds: float,
    *,
    needs_gpus: bool,
) -> dict[int, Future[Any]]:
    """The requests to all hosts; those that name no port in time are not connected with others."""
    numbers = [link.node for link in hosts]
    asked = {number: server.request(number, "free_port") for number in numbers}
    ports = _collect(asked, PORT_SECONDS, lambda: False)
    places = zip(numbers, outer_addresses([hellos[number] for number in numbers]), strict=True)
    peers = {
        place: Peer(address=address, port=port)
        for place, (number, address) in enumerate(places)
        if isinstance(port := ports[number], int) and 0 < port <= LAST_PORT
    }
    digest, token = hashlib.sha256(key.read_bytes()).hexdigest(), secrets.token_hex(16)
    futures: dict[int, Future[Any]] = {}
    for place, number in enumerate(numbers):
        own = [place, *partners(place, len(numbers))] if place in peers else []
        request = HealthRequest(
            key=str(key),
            digest=digest,
            seconds=seconds,
            needs_gpus=needs_gpus,
            me=place,
            peers={other: peers[other] for other in own if other in peers},
            token=token,
        )
        text, limit = request.model_dump_json(), seconds + START_SECONDS
        futures[number] = server.request(number, "run_module", module=MODULE, text=text, seconds=limit)
    return futures


def _collect(asked: Mapping[int, Future[Any]], seconds: float, is_stopped: Callable[[], bool]) -> dict[int, Any]:
    """The results within so many seconds, by number; an exception in place of one that is none."""
    deadline = time.monotonic() + seconds
    while not all(future.done() for future in asked.values()):
        if time.monotonic() >= deadline or is_stopped():
            break
        time.sleep(POLL_SECONDS)
    late = TimeoutError(f"no answer within {seconds:g} s")
    return {
        number: (future.exception() or future.result()) if future.done() else late for number, future in asked.items()
    }


def partners(place: int, hosts: int) -> list[int]:
    """The hosts that a host is connected with, by their places in the list.

    >>> partners(0, 3), partners(0, 20)
    ([1, 2], [1, 2, 4, 8, 12, 16, 18, 19])
    """
    if hosts <= MOST_PAIRS:
        return [other for other in range(hosts) if other != place]
    strides = [1 << power for power in range((hosts - 1).bit_length()) if 1 << power < hosts]
    both = {(place + sign * stride) % hosts for stride in strides for sign in (1, -1)}
    return sorted(both - {place})


def judged(
    names: Mapping[int, str], reports: Mapping[int, HealthReport], silent: Mapping[int, Issue], *, sent: float
) -> Health:
    """Evaluate the reports. names: of all hosts that were asked, by number, in the order of their places; silent: those
    without a report; sent: when they were asked, by the launcher's clock."""
    numbers, found = [*names], dict(silent)
    notes: list[str] = []
    for rule in ("folder", "gpus"):
        wrong = {number: getattr(report, rule) for number, report in reports.items()}
        wrong = {number: text for number, text in wrong.items() if text}
        if len(wrong) == len(names) > 1:
            notes.append(f"all hosts: {next(iter(wrong.values()))}")
            continue
        for number, text in wrong.items():
            found.setdefault(number, Issue(f"host-{rule}", names[number], text, HINT))
    cut = [
        (number, numbers[other], why)
        for number, report in reports.items()
        for other, why in report.unreachable.items()
        if 0 <= other < len(numbers) and numbers[other] in reports
    ]
    notes += [f"{names[a]} cannot connect to {names[b]}: {why}" for a, b, why in cut]
    while pairs := [(a, b) for a, b, _ in cut if a not in found and b not in found]:
        counts = Counter(number for pair in pairs for number in pair)
        worst = max(counts, key=lambda number: (counts[number], numbers.index(number)))
        lost = ", ".join(names[a if b == worst else b] for a, b in pairs if worst in (a, b))
        message = f"no connection between it and {lost}"
        found[worst] = Issue("host-cut-off", names[worst], message, HINT)
    for number, report in reports.items():
        late = max(sent - report.unix_time, report.unix_time - time.time())
        if late > MOST_SKEW:
            notes.append(f"the clock of {names[number]} is {late:.1f} s off the launcher's")
    skipped = dict.fromkeys(text for report in reports.values() for text in report.skipped)
    return Health(found, [*notes, *skipped], reports)
