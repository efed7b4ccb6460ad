"""RUN/nodes/status.json, which `mpctl status` and `mpctl stop` read, on any host.

The launcher writes it every STATUS_SECONDS, with more than RANKS_PER_STATUS ranks up to
LONGEST_STATUS, when a stop is asked for, and once more when the attempt is over. It is replaced
atomically but not synchronised: after a crash of the host its content cannot be relied on.

What many ranks have in common is written once:

    {"schema": "mpctl.attempt/3", "time": 1700000000.0, "phase": "running", "slow": [], "attempt": 1,
     "nodes": [{"node": 0, "host": "n0", "torchrun": "sleeping", "ranks": "0-1"}],
     "processes": ["sleeping"], "doing": ["step 7"],
     "groups": [["tp", "0-1", 0]], "progress": [[7, 6, "all_reduce", 1024]],
     "columns": ["process", "doing", "start", ...],
     "ranks": [[0, 0, 3, 12, 0.4, 1.2, [0], 1.5], [0, 0, 3, 12, 0.3, 1.2, [0], 1.5]]}

A row for each rank, in the order of the nodes and of their `ranks`, with the values of COLUMNS; at
its end those that are 0 are left out. process, doing and groups are places in the lists of these
names; beat and text are seconds since the last heartbeat and since the text changed, 0 where that
is not known; waiting is the place of a group in the row's `groups` + 1, 0 where the rank does not
wait. A group has its name, its members and a place in `progress`: the numbers of the last
collective that was started and finished, kind and bytes of the last one started. Fields of a node
that have their default are left out.

Of more than WHOLE_RANKS ranks the groups are left out in which nobody waits and whose members are
all in the same collective; where the file is longer than LARGEST characters all the same, all are:
readers want the groups to say whom ranks wait for. What the last steps took is not in the file: the
launcher has judged by it.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked

from mpctl.core.durable import write_whole
from mpctl.records.rundir.collective_log import parse_rank_ranges, rank_ranges
from mpctl.records.rundir.slow import SlowPart
from mpctl.run.launch.attempt import AttemptPhase, AttemptState, NodeState, RankState

COMPACT_SCHEMA: Literal["mpctl.attempt/3"] = "mpctl.attempt/3"
COLUMNS = (
    "process",
    "doing",
    "start",
    "beats",
    "beat",
    "text",
    "groups",
    "processor_seconds",
    "waiting",
    "number",
    "major_faults",
    "swapped_bytes",
)
STATUS_SECONDS, LONGEST_STATUS = 2.0, 5.0
RANKS_PER_STATUS = 4000
STATUS_BYTES = 1 << 28
WHOLE_RANKS, LARGEST = 2000, 1_000_000
LEAST_AGE = 0.01
"""Times are rounded to this; the age of something that is known is never 0."""
GroupKey = tuple[str, str]
"""A group by its name and its members."""


@checked(frozen=True)
class AttemptReport:
    """The content of status.json. time: when it was written, in seconds since 1970; slow: what
    holds up the run; attempt: number of the attempt in its launch. Version 3 is written as the module says;
    versions 1, which had no phase, and 2 were written in this form."""

    time: float
    state: AttemptState
    phase: AttemptPhase = AttemptPhase.RUNNING
    schema: Literal["mpctl.attempt/1", "mpctl.attempt/2", "mpctl.attempt/3"] = COMPACT_SCHEMA
    slow: Sequence[SlowPart] = ()
    attempt: int = 1


REPORT: TypeAdapter[AttemptReport] = TypeAdapter(AttemptReport)


class _Places(dict[Hashable, int]):
    """The place of each value in the list of those that have been asked for."""

    def __missing__(self, value: Hashable) -> int:
        self[value] = place = len(self)
        return place


def compact(report: AttemptReport) -> str:
    """The content of the file."""
    is_whole = len(report.state.ranks) <= WHOLE_RANKS
    content = _content(report, None if is_whole else _uneven_groups(report.state))
    return content if len(content) <= LARGEST else _content(report, frozenset())


def _uneven_groups(state: AttemptState) -> Set[GroupKey]:
    """The groups in which a rank waits, or whose members are not known to be in the same
    collective."""
    numbers: defaultdict[GroupKey, list[int]] = defaultdict(list)
    waited: set[GroupKey] = set()
    for rank in state.ranks.values():
        progress = rank.breadcrumb.collectives
        if progress.waits_in is not None:
            waited.add(progress.waits_in.key)
        for group in progress.groups:
            numbers[group.key].append(group.started)
    uneven = {key for key, found in numbers.items() if len(found) < 2 or len(set(found)) > 1}
    return waited | uneven


def _content(report: AttemptReport, kept: Set[GroupKey] | None) -> str:
    """The content with these groups, with all when None."""
    processes, doing, groups, progresses = _Places(), _Places(), _Places(), _Places()

    def age(time: float) -> float:
        return max(LEAST_AGE, round(report.time - time, 2)) if time else 0

    def row(rank: RankState) -> list[Any]:
        shared_state, progress = rank.breadcrumb, rank.breadcrumb.collectives
        of_rank, waits_in = progress.groups, progress.waits_in
        if kept is not None:
            of_rank = tuple(group for group in of_rank if group.key in kept)
        waiting = 0 if waits_in is None or waits_in not in of_rank else of_rank.index(waits_in) + 1
        values = [
            processes[rank.process],
            doing[shared_state.doing],
            shared_state.start,
            shared_state.beats,
            age(shared_state.beat_time),
            age(shared_state.text_time),
            [groups[g.name, g.members, progresses[g.started, g.finished, g.kind, g.bytes]] for g in of_rank],
            round(rank.processor_seconds, 2),
            waiting,
            progress.number if waiting else 0,
            rank.major_faults,
            rank.swapped_bytes,
        ]
        while values and not values[-1]:
            values.pop()
        return values

    nodes = report.state.nodes
    rows = [row(node.ranks[rank]) for node in nodes for rank in node.ranks]
    document = {
        "schema": COMPACT_SCHEMA,
        "time": report.time,
        "phase": report.phase,
        "slow": [asdict(part) for part in report.slow],
        "attempt": report.attempt,
        "nodes": [_node_row(node) for node in nodes],
        "processes": list(processes),
        "doing": list(doing),
        "groups": list(groups),
        "progress": list(progresses),
        "columns": COLUMNS,
        "ranks": rows,
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def _node_row(node: NodeState) -> dict[str, Any]:
    """A node's fields that do not have their default, and the numbers of its ranks."""
    found: dict[str, Any] = {"node": node.node}
    default = type(node)()
    for field in fields(node):
        value = getattr(node, field.name)
        if field.name != "ranks" and value != getattr(default, field.name):
            found[field.name] = dict(value) if isinstance(value, Mapping) else value
    return {**found, "ranks": rank_ranges([*node.ranks])}


def _numbers(ranks: str) -> Sequence[int]:
    return parse_rank_ranges(ranks) if ranks else ()


def expand(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document in the form of an AttemptReport. Raises ValueError, KeyError, TypeError or
    IndexError for one that is none."""
    rows, time = iter(document["ranks"]), document["time"]
    processes, doing, groups = (document[name] for name in ("processes", "doing", "groups"))
    names = ("started", "finished", "kind", "bytes")
    progress = [dict(zip(names, one, strict=True)) for one in document["progress"]]
    groups = [{"name": name, "members": members, **progress[place]} for name, members, place in groups]

    def moment(age: float) -> float:
        return time - age if age else 0.0

    def rank(row: list[Any]) -> dict[str, Any]:
        found = dict(zip(document["columns"], row, strict=False))
        waiting = found.get("waiting", 0)
        return {
            "process": processes[found.get("process", 0)],
            "processor_seconds": found.get("processor_seconds", 0.0),
            "major_faults": found.get("major_faults", 0),
            "swapped_bytes": found.get("swapped_bytes", 0),
            "breadcrumb": {
                "doing": doing[found.get("doing", 0)],
                "start": found.get("start", 0),
                "beats": found.get("beats", 0),
                "beat_time": moment(found.get("beat", 0)),
                "text_time": moment(found.get("text", 0)),
                "collectives": {
                    "groups": [groups[place] for place in found.get("groups", ())],
                    "waiting": waiting - 1 if waiting else None,
                    "number": found.get("number", 0),
                },
            },
        }

    nodes = [
        {**node, "ranks": {number: rank(next(rows)) for number in _numbers(node["ranks"])}}
        for node in document["nodes"]
    ]
    common = {name: document[name] for name in ("schema", "time", "phase", "slow")}
    return {**common, "attempt": document.get("attempt", 1), "state": {"nodes": nodes}}


@dataclass
class StatusFile:
    """Writes the state of one attempt while it runs. next_write: by time.monotonic(); slow: what
    holds up the run; attempt: its number."""

    path: Path
    attempt: int = 1
    next_write: float = float("-inf")
    slow: Sequence[SlowPart] = ()

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.next_write

    def write(self, state: AttemptState, phase: AttemptPhase) -> None:
        """Write this state; a file that cannot be written is left unchanged."""
        pause = STATUS_SECONDS * len(state.ranks) / RANKS_PER_STATUS
        self.next_write = time.monotonic() + min(max(STATUS_SECONDS, pause), LONGEST_STATUS)
        content = compact(AttemptReport(time.time(), state, phase, slow=self.slow, attempt=self.attempt))
        with suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.path, content, sync=False)


def read_status(path: Path) -> AttemptReport | None:
    """The report in a file; None when there is none, or the file holds something else."""
    try:
        if not path.is_file() or path.stat().st_size > STATUS_BYTES:
            return None
        document = json.loads(path.read_bytes())
        is_compact = document["schema"] == COMPACT_SCHEMA
        return REPORT.validate_python(expand(document) if is_compact else document)
    except (OSError, ValueError, LookupError, TypeError, StopIteration, RecursionError):
        return None
