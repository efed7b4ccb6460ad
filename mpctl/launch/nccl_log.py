"""What torch's NCCL backend writes to a rank's log when a collective times out.

Its watchdog writes which collective of which process group did not end and how far the rank was,
and then aborts the process, so that no exception is recorded. Lines of torch 2.5 and of 2.7 on (the
file ProcessGroupNCCL.cpp of torch writes them; the group's description is what `new_group` got):

    [rank2]:[E321 ... ProcessGroupNCCL.cpp:607] [Rank 2] Watchdog caught collective operation
        timeout: WorkNCCL(SeqNum=78, OpType=ALLREDUCE, ...) ran for 600027 milliseconds ...
    [rank2]:[E321 ... ProcessGroupNCCL.cpp:1664] [PG 1 Rank 0] Exception (either an error or
        timeout) detected by watchdog at work: 78, last enqueued NCCL work: 79, ...
    [rank2]:[E810 ... ProcessGroupNCCL.cpp:2241] [PG ID 1 PG GUID 5(tp 2-3) Rank 0]  failure
        detected by watchdog at work sequence id: 78 PG status: last enqueued work: 79, ...

mpctl describes its groups as `tp 2-3` (rundir/collective_log.py), so that the members are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpctl.launch.verdict import Verdict
from mpctl.rundir.collective_log import RANGES, parse_rank_ranges
from mpctl.units import ranks_text

WATCHDOG = "Watchdog caught collective operation timeout"
DEFAULT = "default_pg"
"""torch's description of the group of all ranks."""
OPERATION = re.compile(rf"{WATCHDOG}: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
STATUS = re.compile(
    r"\[PG (?:ID )?(?P<id>\w+)(?: PG GUID \w+(?:\((?P<description>[^)]*)\))?)? Rank \d+\]"
    r".{0,80}? by watchdog at work(?: sequence id)?: (?P<work>\d+)(?:,| PG status:)"
    r" last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+)"
)


@dataclass(frozen=True)
class NcclTimeout:
    """A collective of a group that did not end. group: the description of the process group,
    empty where the line has none; number: of the collective in its group, as NCCL counts;
    operation: ALLREDUCE, empty where it is not known; enqueued: number of the last collective that
    this rank has started there."""

    group: str
    number: int
    operation: str
    enqueued: int


def watchdog_timeouts(log: str) -> Iterator[NcclTimeout]:
    """The time-outs that a rank's log tells of."""
    operations = {int(number): operation for number, operation in OPERATION.findall(log)}
    for match in STATUS.finditer(log):
        number = int(match["work"])
        group = match["description"] or ""
        yield NcclTimeout(group, number, operations.get(number, ""), int(match["enqueued"]))


def judge_nccl_logs(logs: Mapping[int, str]) -> Verdict | None:
    """Which rank did not join which collective, from the logs of all ranks; None where no log says
    so, or where all members of the groups have started what timed out."""
    by_group: dict[str, dict[int, NcclTimeout]] = {}
    for rank, log in logs.items():
        for timeout in watchdog_timeouts(log):
            by_group.setdefault(timeout.group, {}).setdefault(rank, timeout)
    verdicts = (_judge_group(group, seen, len(logs)) for group, seen in sorted(by_group.items()))
    blamed = [verdict for verdict in verdicts if verdict is not None]
    waiting = {rank for seen in by_group.values() for rank in seen}
    return next((v for v in blamed if v.rank not in waiting), blamed[0] if blamed else None)


def _judge_group(group: str, seen: Mapping[int, NcclTimeout], world_size: int) -> Verdict | None:
    """The first member that has not started the earliest collective that timed out."""
    everyone = f"world 0-{world_size - 1}"
    name, _, members = (everyone if group == DEFAULT else group).rpartition(" ")
    if not RANGES.fullmatch(members):
        return None
    first = min(seen.values(), key=lambda timeout: timeout.number)
    ranks = list(parse_rank_ranges(members))
    late = [r for r in ranks if r not in seen or seen[r].enqueued < first.number]
    if not late:
        return None
    waiting = [rank for rank in seen if rank not in late]
    return Verdict(
        late[0],
        f"did not join {first.operation or 'collective'} #{first.number} of group {name} "
        f"({ranks_text(ranks)}), in which {ranks_text(waiting)} waited until NCCL's watchdog "
        "ended the wait",
    )
