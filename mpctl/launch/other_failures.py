"""What the other ranks of a failed attempt said: echoes of the first failure as one, others apart.

When a rank of 512 dies, 511 ranks record that they lost a peer, each with an address of its own.
Only the first failure and those that are no echo tell anything; the rest is a number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from mpctl.launch.attempt import AttemptState
from mpctl.rundir.merged_logs import merge_logs
from mpctl.units import plural, ranks_text

UNSAID = "an error without words"


@dataclass(frozen=True)
class OtherFailure:
    """Ranks that failed alike, besides the first. error: what they said, with `…` where they
    differ; is_echo: it only says that they lost a peer."""

    ranks: tuple[int, ...]
    error: str
    is_echo: bool

    def __str__(self) -> str:
        who = ranks_text(self.ranks, most=4)
        if not self.is_echo:
            return f"{who}: {self.error}"
        whose = "its peer" if len(self.ranks) == 1 else "their peers"
        return f"{plural(len(self.ranks), 'rank')} lost {whose} ({who}): {self.error}"


def other_failures(state: AttemptState, first: int | None) -> tuple[OtherFailure, ...]:
    """The failures besides that of rank `first`; None: the failure was of no rank. Those that are
    no echo come first."""
    records = [record for record in state.failures if record["rank"] != first]
    causes = {record["rank"]: record["error"] for record in records if not record["is_echo"]}
    echoes = {record["rank"]: record["error"] for record in records if record["is_echo"]}
    known = {record["rank"] for record in state.failures} | {first}
    killed = {rank: code for rank, code in state.ended_ranks.items() if rank not in known}
    return (*_alike(causes), *_endings(killed), *_echo(echoes))


def _alike(errors: dict[int, str]) -> Iterator[OtherFailure]:
    """Errors that differ in a rank's own values only are one."""
    for entry in merge_logs({rank: [error or UNSAID] for rank, error in errors.items()}):
        yield OtherFailure(entry.ranks, entry.text, is_echo=False)


def _echo(errors: dict[int, str]) -> Iterator[OtherFailure]:
    """All echoes together, with the words that most of them have in common."""
    if errors:
        most = max(_alike(errors), key=lambda other: len(other.ranks))
        yield OtherFailure(tuple(sorted(errors)), most.error, is_echo=True)


def _endings(codes: dict[int, int]) -> Iterator[OtherFailure]:
    """Ranks without a record that a signal ended."""
    by_code: defaultdict[int, list[int]] = defaultdict(list)
    for rank, code in sorted(codes.items()):
        if code < 0:
            by_code[code].append(rank)
    for code, ranks in by_code.items():
        yield OtherFailure(tuple(ranks), f"killed by signal {-code}", is_echo=False)
