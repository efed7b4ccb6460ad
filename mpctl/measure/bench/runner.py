"""Runs the cases of a bench in rounds, A B C A B C, and yields every run as it ends.

Each run is a launch like `mpctl launch`'s, in OUT/CASE-rN with its records, reports and summary.
Interleaved rounds spread disturbances on the machine over all cases alike. A round begins only if
one as long as the longest so far would end within the budget; the first always begins.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median

from mpctl.core.errors import RunFailed
from mpctl.measure.bench.cases import PlannedCase, shared_units, with_data
from mpctl.measure.bench.report import BenchEnvironment, BenchReport, save_report, take_folder
from mpctl.plan.estimate.step import StepTime
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.rank_files import RankReport, StepRecord
from mpctl.records.rundir.summary import WARM_UP_STEPS, RunSummary, write_summary
from mpctl.run.clusters.connect import connected
from mpctl.run.hosts.checks import common_machine
from mpctl.run.hosts.machine import HostFacts
from mpctl.run.launch.set_up import Progress, set_up_run
from mpctl.run.launch.summary import summarise
from mpctl.run.launch.supervise import OnEvent, run_launch


@dataclass
class Budget:
    """seconds: limit of all rounds together, None for no limit; clock: returns the time in seconds;
    longest: seconds of the longest round so far."""

    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    longest: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float | None:
        """Remaining seconds, at least 0; None without a limit."""
        return None if self.seconds is None else max(self.began + self.seconds - self.clock(), 0.0)

    def fits(self, seconds: float) -> bool:
        """Whether as many seconds are left."""
        return self.left is None or seconds <= self.left

    def rounds(self, most: int) -> Iterator[int]:
        """The numbers of the rounds from 0 on: at most `most`, as long as time is left."""
        for number in range(most):
            left = self.left
            if number and left is not None and left < self.longest:
                return
            began = self.clock()
            yield number
            self.longest = max(self.longest, self.clock() - began)

    def likely(self, number: int, most: int) -> int:
        """The expected number of rounds when round `number` begins: `most` without a limit or an
        earlier round."""
        left = self.left
        if left is None or not self.longest:
            return most
        return min(most, number + max(1, int(left / self.longest)))


TRAINING = "train the cases"


@dataclass(frozen=True)
class CaseRun:
    """One finished run of a case; its launch is that of the hosts that ran it.

    round: its number from 0; records: of all its steps; reports: of its ranks; summary: as in
    RUN/summary.json; units: cores (divided by the threads of a rank) or GPUs that the ranks shared,
    on all hosts together; hosts: their facts.
    """

    case: PlannedCase
    round: int
    run: RunDir
    records: Sequence[StepRecord]
    reports: Sequence[RankReport]
    summary: RunSummary
    units: int
    hosts: tuple[HostFacts, ...] = ()

    @property
    def steady(self) -> Sequence[StepRecord]:
        """The records after the warm-up, or all where there are no more."""
        return self.records[WARM_UP_STEPS:] or self.records

    @property
    def step_seconds(self) -> float:
        """The median time of a step after the warm-up."""
        return median(record["step_seconds"] for record in self.steady)


@dataclass(frozen=True)
class Watch:
    """Called while cases run. on_progress: (stage, done, total), in steps of all runs
    together; on_title: the title of a run that begins; on_event: a message for people."""

    on_progress: Progress
    on_title: Callable[[str], None] = lambda title: None
    on_event: OnEvent = lambda message: None


def run_cases(
    cases: Sequence[PlannedCase],
    out: Path,
    *,
    command: str,
    rounds: int,
    budget: Budget,
    watch: Watch,
    is_taken: bool = False,
    first: int = 0,
) -> Iterator[CaseRun]:
    """Every run of every case as it ends, in at most `rounds` rounds. `out` is cleared of an
    earlier bench and the data are prepared before the first.

    command: the command line, for each summary. is_taken: the bench has already cleared `out`, and
    its files there stay. first: number of the first round. Raises RunFailed at the first run that
    fails, KeyboardInterrupt when one was stopped, InputError when `out` or a corpus cannot be used.
    """
    if not is_taken:
        take_folder(out)
    ready = list(with_data(cases, out, watch.on_progress))
    done, each_round = 0, sum(case.job.training.steps for case in ready)
    for number in budget.rounds(rounds):
        likely = budget.likely(number, rounds)
        for case in ready:

            def on_step(step: int, before: int = done, total: int = likely * each_round) -> None:
                watch.on_progress(TRAINING, before + step, total)

            on_step(0)
            turn = f", round {first + number + 1} of {first + likely}" if rounds > 1 else ""
            watch.on_title(case.title + turn)
            run = RunDir(out / f"{case.name}-r{first + number + 1}")
            ran = _run(case, first + number, run, command, on_step, watch.on_event)
            done += case.job.training.steps
            on_step(case.job.training.steps)
            yield ran


@dataclass
class CaseBench(ABC):
    """A bench that trains its cases in rounds, with the runs so far.

    environment, command: for the report; rounds: number of runs of each case.
    """

    environment: BenchEnvironment
    command: str
    rounds: int
    cases: Sequence[PlannedCase]
    runs: list[CaseRun] = field(default_factory=list, kw_only=True)

    @abstractmethod
    def report(self) -> BenchReport:
        """The report of the runs so far."""

    @property
    def is_complete(self) -> bool:
        """Whether every case ran in every round."""
        return len(self.runs) == self.rounds * len(self.cases)

    def run(self, out: Path, *, budget: Budget, watch: Watch) -> None:
        """Run all rounds, and write the report into the folder `out` after every run. Raises as
        `run_cases` does, and InputError where the report cannot be written."""
        runs = run_cases(self.cases, out, command=self.command, rounds=self.rounds, budget=budget, watch=watch)
        for run in runs:
            self.runs.append(run)
            save_report(out, self.report())


def hosts_of(runs: Iterable[CaseRun]) -> list[HostFacts]:
    """The hosts that had ranks of any of the runs, by name."""
    by_name = {host.name: host for run in runs for host in run.hosts}
    return [by_name[name] for name in sorted(by_name)]


def group_runs(runs: Sequence[CaseRun]) -> Mapping[str, list[CaseRun]]:
    """The runs by the name of their case, in the order in which cases first ran."""
    groups: dict[str, list[CaseRun]] = {}
    for run in runs:
        groups.setdefault(run.case.name, []).append(run)
    return groups


def _run(
    case: PlannedCase, number: int, run: RunDir, command: str, on_step: Callable[[int], None], on_event: OnEvent
) -> CaseRun:
    plan = replace(case.plan, job=case.plan.job.model_copy(update={"data": case.job.data}))
    connection = connected(plan, run, on_event, warnings=case.launch.warnings)
    with run.locked(), connection as (cluster, launch):
        machine = common_machine(cluster.hosts)
        set_up_run(launch, overwrite=True, resume=False, on_progress=lambda *_: None)
        outcome = run_launch(launch, cluster, lambda record: on_step(record["step"]), on_event)
        summary = summarise(plan, launch, outcome, command=command)
        write_summary(run.summary, summary)
    if outcome.status == "stopped":
        raise KeyboardInterrupt
    if outcome.failure is not None:
        raise RunFailed(f"{case.title}: {outcome.failure}; its log: {outcome.failure.log}")
    hosts = tuple(cluster.hosts)
    units = shared_units(launch.job, machine) * len(hosts)
    ran = replace(case, launch=launch)
    return CaseRun(ran, number, run, list(run.records()), run.rank_reports(), summary, units, hosts)


def communication_share(runs: Sequence[CaseRun]) -> float | None:
    """The share of a step in which a rank waits, the mean over the ranks and the median over the
    runs; None where no rank reported it."""
    shares = [
        mean(shares)
        for run in runs
        if (shares := [r["communication_share"] for r in run.reports if "communication_share" in r])
    ]
    return median(shares) if shares else None


def planned_share(time: StepTime) -> float:
    """The share of a planned step in exposed messages and bubbles."""
    return (time.tp + time.cp + time.pp + time.dp_cp + time.bubble) / time.total
