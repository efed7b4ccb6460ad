"""Collectives along the axes of a layout: measured by its ranks, as rows, fits and a report.

The ranks are a launch on the hosts of any backend (bench/probe.py) that train nothing; they take
the cases in turns (runtime/collective_bench.py). Sizes, columns and definitions are nccl-tests'.

By hand, 7 kinds over tp and dp, 8 sizes, gloo and shared memory, which has no sendrecv: 2 x (7 + 6)
x 8 = 208 rows, each of some rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict

from mpctl.bench.collective_cases import CollectiveCases
from mpctl.bench.collective_rows import (
    CollectiveFit,
    CollectiveRow,
    collective_rows,
    fit_collectives,
)
from mpctl.bench.probe import probe_answers
from mpctl.bench.report import SCHEMA, BenchEnvelope, BenchEnvironment, environment_on
from mpctl.launch.node.facts import HostFacts
from mpctl.launch.set_up import Progress
from mpctl.rundir.collective_files import (
    AbsentTransport,
    CollectiveAnswer,
    CollectiveRound,
    CollectivesRequest,
)
from mpctl.rundir.directory import RunDir

STARTING, TIMING = "start the ranks", "time the collectives"


@dataclass
class MeasuredCollectives:
    """What came of a bench so far. rounds: by number of the case; absent: ways to send that groups
    of an axis did not have; hosts: facts of those that had the ranks, once known."""

    cases: CollectiveCases
    rounds: dict[int, list[CollectiveRound]] = field(default_factory=dict)
    absent: list[AbsentTransport] = field(default_factory=list)
    is_complete: bool = True
    hosts: tuple[HostFacts, ...] = ()

    @property
    def timed(self) -> list[int]:
        """The numbers of the cases whose axis has their way to send."""
        absent = {(way["axis"], way["transport"]) for way in self.absent}
        return [
            number
            for number, case in enumerate(self.cases.cases)
            if (case["axis"], case["transport"]) not in absent
        ]

    @property
    def rows(self) -> list[CollectiveRow]:
        """A row for each case that was timed."""
        return collective_rows(self.cases, self.rounds)

    @property
    def wrong(self) -> list[CollectiveRow]:
        """The rows whose results are wrong."""
        return [row for row in self.rows if row["wrong"] > 0]


class AbsentWay(TypedDict):
    """Groups of an axis have no such way to send, so that nothing was timed over it."""

    axis: str
    transport: str


class CollectiveFindings(TypedDict):
    """What was timed, and the lines through it. layout: ranks of a group, by axis; is_rehearsal:
    more ranks on a node than cores (GPUs); iterations, warm_up: calls of a round; root: rank of the
    group; absent: ways to send that some axis has not."""

    layout: dict[str, int]
    ranks: int
    is_rehearsal: bool
    iterations: int
    warm_up: int
    root: int
    fits: list[CollectiveFit]
    absent: list[AbsentWay]


class CollectivesReport(BenchEnvelope):
    """What `mpctl bench collectives --json` prints."""

    results: list[CollectiveRow]
    findings: CollectiveFindings


def measure_collectives(
    cases: CollectiveCases,
    run: RunDir,
    *,
    on_progress: Progress = lambda *_: None,
    on_round: Callable[[MeasuredCollectives], None] = lambda _: None,
    on_event: Callable[[str], None] = lambda _: None,
) -> MeasuredCollectives:
    """Time every case, with the ranks' files in `run`; what Ctrl-C leaves is incomplete.

    on_progress: told (stage, done, total); on_round: called after every round; on_event: messages
    of the launcher for people. Raises InputError where the hosts cannot run the layout, RunFailed
    where a rank fails.
    """
    measured = MeasuredCollectives(cases)
    rounds, timed = cases.options.rounds, list(range(len(cases.cases)))
    on_progress(STARTING, 0, 1)

    def take(answer: CollectiveAnswer) -> None:
        if answer["event"] == "absent":
            measured.absent.append(answer)
            timed[:] = measured.timed
            return
        measured.rounds.setdefault(answer["case"], []).append(answer)
        on_progress(STARTING, 1, 1)
        done = answer["round"] * len(timed) + timed.index(answer["case"]) + 1
        on_progress(TIMING, done, rounds * len(timed))
        if answer["case"] == timed[-1]:
            on_round(measured)

    probed = probe_answers(cases.plan, _request(cases), run, on_answer=take, on_event=on_event)
    measured.cases = cases.on_hosts(probed.machine)
    measured.is_complete, measured.hosts = probed.is_complete, probed.hosts
    return measured


def collectives_report(
    measured: MeasuredCollectives, environment: BenchEnvironment, command: str
) -> CollectivesReport:
    """What was measured, as JSON."""
    cases, rows = measured.cases, measured.rows
    asked = cases.options
    is_complete = measured.is_complete and all(row["rounds"] == asked.rounds for row in rows)
    return {
        "schema": SCHEMA,
        "bench": "collectives",
        "job": cases.plan.job.name,
        "is_complete": is_complete,
        "environment": environment_on(environment, measured.hosts),
        "command": command,
        "results": rows,
        "findings": {
            "layout": {axis: ranks for axis, ranks in cases.sizes.items() if ranks > 1},
            "ranks": cases.topology.world_size,
            "is_rehearsal": cases.is_rehearsal,
            "iterations": asked.iterations,
            "warm_up": asked.warm_up,
            "root": asked.root,
            "fits": fit_collectives(rows),
            "absent": [
                {"axis": way["axis"], "transport": way["transport"]} for way in measured.absent
            ],
        },
    }


def _request(cases: CollectiveCases) -> CollectivesRequest:
    options = cases.options
    return {
        "task": "collectives",
        "cases": list(cases.cases),
        "rounds": options.rounds,
        "iterations": options.iterations,
        "warm_up": options.warm_up,
        "root": options.root,
        "check": options.check,
        "seconds": options.seconds,
    }
