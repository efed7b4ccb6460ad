"""Links between hosts that have become slow, by the time that ranks spend in messages.

The time of a rank in a collective is that of the wire and of waiting for later peers. The last rank
to come waits for nobody: its time is the wire's. So the least time among the members of a group is
what the wire takes, in the part of the messages that does not pass while the ranks compute. For a
message between two stages of a pipeline the two are such a group: while only the receiver waits,
the sender is late, and while both do, it is the wire.

Each rank reports medians over WINDOW steps of its time in the messages of each of its groups
(records/rundir/step_log.py); the least of them is at most the wire's time and what chance adds, where now
one member and now another is late. Groups within a host are left out: their messages go through its
memory, and their times are those of its processors.

A link is slow when that time

- is FACTOR times what it was in the first WINDOW steps, or what it is in other groups of the same
  axis that send as many bytes between as many hosts (their median); and
- by more than the ranks of the group compute longer than at first, as a busy host does both later;
  and
- has grown by WORTH of the step.

By hand, dp_cp over hosts n1 (ranks 0, 1) and n2 (2, 3), in steps of 100 ms: ranks 0 and 2 are 8 and
30 ms in it, since rank 0 comes later, and the wire takes 8. With a link of half the speed they are
16 and 38: twice as long, but 8 ms of 100 are not worth a word. With a fifth, 40 and 62 ms: the link
between n1 and n2 takes 5 times as long.

A ring over more than two hosts is as slow as its slowest hop, and every rank waits alike: then the
hosts of the group are named, without those of groups of the same axis that are as fast as before,
where two or more are left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from mpctl.core.units import bytes_text, ranks_text
from mpctl.records.rundir.collective_log import CollectiveProgress, parse_rank_ranges
from mpctl.records.rundir.slow import SlowPart
from mpctl.records.rundir.step_log import WINDOW
from mpctl.run.launch.stragglers import Times

FACTOR, WORTH = 2.0, 0.1
STILL = 0.75
"""The share of both at which a link that was slow still is."""
LEAST_USUAL = 0.01
"""Least usual time of a link, as a share of a step: overlapped messages may take less."""
Key = tuple[str, str]
"""A group by its name and its ranks, as the collective log has them."""


@dataclass(frozen=True)
class Wire:
    """The messages of a group between hosts. time: of the wire, microseconds of a step; length: of
    the step; size: bytes of a step; hosts: of the members, each once; is_message: it is one rank's
    messages to another."""

    axis: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    is_message: bool
    time: float
    length: float
    size: int


@dataclass(frozen=True)
class SlowWire:
    """usual: microseconds that the wire took, or that others take; since: about which step."""

    wire: Wire
    usual: float
    since: int

    @property
    def ratio(self) -> float:
        return self.wire.time / max(self.usual, LEAST_USUAL * self.wire.length)


@dataclass
class LinkWatch:
    """Finds the slow links of one attempt. hosts: of each rank; members: the ranks of each group;
    past: the first time of each wire; since: of the slow ones, the step from which on."""

    hosts: Mapping[int, str] = field(default_factory=dict)
    members: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    past: dict[Key, float] = field(default_factory=dict)
    since: dict[Key, int] = field(default_factory=dict)

    def find(
        self, times: Times, progress: Mapping[int, CollectiveProgress], growth: Mapping[int, float]
    ) -> list[SlowPart]:
        """The slow links now. times, progress: of every rank; growth: what each rank computes over
        what it computed at first."""
        if not times or not all(of.is_full for of in times.values()):
            return []
        newest = min(of.last for of in times.values())
        wires = self._wires(times, progress)
        for key, wire in wires.items():
            self.past.setdefault(key, wire.time)
        slow: dict[Key, SlowWire] = {}
        usual_of_others = _times_of_others(wires.values())
        for key, wire in wires.items():
            usual = min(self.past[key], usual_of_others[_like(wire)])
            longer = max(1.0, median(growth.get(rank, 1.0) for rank in wire.ranks))
            still = STILL if key in self.since else 1.0
            is_slow = wire.time >= still * FACTOR * longer * usual
            if is_slow and wire.time - usual * longer >= still * WORTH * wire.length:
                began = newest - WINDOW // 2  # medians have changed after half of the window
                slow[key] = SlowWire(wire, usual, self.since.get(key, began))
        self.since = {key: one.since for key, one in slow.items()}
        return self._parts(slow, wires, newest)

    def _wires(self, times: Times, progress: Mapping[int, CollectiveProgress]) -> dict[Key, Wire]:
        """Return the groups between hosts after reports of all members, with the least time."""
        seen: defaultdict[Key, list[tuple[int, int, bool]]] = defaultdict(list)
        for rank, of in times.items():
            groups = progress[rank].groups
            for group, spent, size in zip(groups, of.waits, of.sizes, strict=False):
                seen[group.key].append((spent, size, group.kind == "send"))
        wires: dict[Key, Wire] = {}
        for key, found in seen.items():
            if key not in self.members:
                self.members[key] = tuple(parse_rank_ranges(key[1]))
            ranks = self.members[key]
            hosts = tuple(dict.fromkeys(self.hosts.get(rank, "") for rank in ranks))
            if len(found) < len(ranks) or len(hosts) < 2 or "" in hosts:
                continue
            least, size = min(spent for spent, _, _ in found), max(size for _, size, _ in found)
            length = median(times[rank].length for rank in ranks)
            is_message = any(is_send for _, _, is_send in found)
            wires[key] = Wire(key[0], ranks, hosts, is_message, least, length, size)
        return wires

    def _parts(self, slow: Mapping[Key, SlowWire], wires: Mapping[Key, Wire], newest: int) -> list[SlowPart]:
        """The slow wires of an axis between the same hosts are one link."""
        links: defaultdict[tuple[str, tuple[str, ...]], list[SlowWire]] = defaultdict(list)
        for one in slow.values():
            wire = one.wire
            alike = (wire.axis, wire.is_message)
            others = (other for key, other in wires.items() if key not in slow)
            fast = {h for o in others if (o.axis, o.is_message) == alike for h in o.hosts}
            left = tuple(host for host in wire.hosts if host not in fast)
            links[wire.axis, left if len(left) > 1 else wire.hosts].append(one)
        return [_describe(axis, hosts, found, newest) for (axis, hosts), found in links.items()]


def _like(wire: Wire) -> tuple[str, int, int, frozenset[str]]:
    """Return the key of wires that are compared with the same others."""
    return wire.axis, wire.size, len(wire.hosts), frozenset(wire.hosts)


def _times_of_others(wires: Iterable[Wire]) -> dict[tuple[str, int, int, frozenset[str]], float]:
    """Return the median time of wires between other hosts, of the same axis, size and number of hosts; infinite if
    there are none. Each class is sorted once: a pipeline of thousands of ranks has thousands of wires."""
    of_hosts: defaultdict[tuple[str, int, int, frozenset[str]], list[float]] = defaultdict(list)
    of_class: defaultdict[tuple[str, int, int], list[float]] = defaultdict(list)
    for wire in wires:
        of_hosts[_like(wire)].append(wire.time)
        of_class[_like(wire)[:3]].append(wire.time)
    for all_times in of_class.values():
        all_times.sort()
    usual: dict[tuple[str, int, int, frozenset[str]], float] = {}
    for like, own in of_hosts.items():
        others = of_class[like[:3]].copy()
        for one in own:
            del others[bisect_left(others, one)]
        usual[like] = median(others) if others else float("inf")
    return usual


def _describe(axis: str, hosts: tuple[str, ...], found: Sequence[SlowWire], newest: int) -> SlowPart:
    worst = max(found, key=lambda one: one.ratio)
    ranks = tuple(sorted({rank for one in found for rank in one.wire.ranks}))
    since, ratio, wire = min(one.since for one in found), worst.ratio, worst.wire
    if wire.is_message:
        where = f"the link from host {hosts[0]} to host {hosts[1]}"
    elif len(hosts) == 2:
        where = f"the link between hosts {hosts[0]} and {hosts[1]}"
    else:
        where = f"a link between hosts {', '.join(hosts[:-1])} and {hosts[-1]}"
    text = (
        f"{where} takes {ratio:.1f} times as long as before for messages of {axis} "
        f"({ranks_text(ranks)}) since about step {since}: {wire.time / 1e3:.0f} ms of a step of "
        f"{wire.length / 1e3:.0f} ms for {bytes_text(wire.size)}, {worst.usual / 1e3:.0f} ms before"
    )
    return SlowPart("link", where, ranks, hosts, axis, round(ratio, 2), since, newest, text)
