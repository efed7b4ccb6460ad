"""A bench in ranks: one launch whose workers measure instead of training, on the hosts of any
backend.

A launch of a bench is one of a training with RUN/bench.json next to RUN/job.json. The workers
answer that request (train/runtime/worker.py) and rank 0 appends each answer to RUN/answers.jsonl. The
launcher handles hosts, torchrun, hangs, failures and signals as usual; no data are prepared,
nothing is saved, and a failure is not followed by another attempt.

Every bench in ranks is a `RankBench`: it sends one request, collects the answers, and makes a
report of those it has, which is saved after each round.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from mpctl.core.errors import InputError, RunFailed
from mpctl.measure.bench.report import BenchEnvironment, BenchReport
from mpctl.measure.bench.runner import Watch
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.requests import BenchRequest
from mpctl.records.rundir.summary import write_summary
from mpctl.run.clusters.backend import OnEvent
from mpctl.run.clusters.connect import bench_issues, connected
from mpctl.run.hosts.checks import common_machine
from mpctl.run.hosts.machine import HostFacts, Machine, this_machine
from mpctl.run.launch.cluster import Cluster
from mpctl.run.launch.follow import EventLog, OnAnswer
from mpctl.run.launch.launch_plan import LaunchPlan
from mpctl.run.launch.set_up import set_up_run
from mpctl.run.launch.summary import summarise
from mpctl.run.launch.supervise import RunOutcome, run_launch


@dataclass(frozen=True)
class Probed:
    """How a bench in ranks ended. is_complete: False after Ctrl-C, SIGTERM, SIGHUP or `mpctl stop`;
    hosts: the facts of those that had the ranks."""

    is_complete: bool
    hosts: tuple[HostFacts, ...]


def require_probes(plans: Sequence[Plan]) -> None:
    """Raises InputError with every reason, found without contacting a host, why ranks of these
    plans cannot be started to measure."""
    machine = this_machine()
    issues = [issue for plan in plans for issue in bench_issues(_measuring(plan), machine, only_measures=True)]
    if issues:
        raise InputError(dict.fromkeys(issues))


def probe_answers(plan: Plan, request: BenchRequest, run: RunDir, *, on_answer: OnAnswer, on_event: OnEvent) -> Probed:
    """Have the ranks of a legal plan answer a request; files of an earlier bench in `run` are
    replaced.

    on_answer: called with each answer of rank 0 as it comes; on_event: with messages for people.
    Raises InputError when the hosts cannot run the plan, RunFailed when a rank failed.
    """
    require_probes([plan])
    plan = _measuring(plan)
    with run.locked(), connected(plan, run, on_event) as (cluster, ready):
        launch = _asking(ready, request)
        outcome = _run(launch, cluster, on_answer, on_event)
        write_summary(run.summary, summarise(plan, launch, outcome, command=""))
        hosts = tuple(cluster.hosts)
    if outcome.failure is not None:
        raise RunFailed(f"{outcome.failure}; its log: {outcome.failure.log}")
    return Probed(outcome.status == "finished", hosts)


def _measuring(plan: Plan) -> Plan:
    """The plan without settings that concern training only: restarts, fewer hosts, the memory of a
    step."""
    own = {"max_restarts": 0, "elastic": False, "check_memory": False}
    launch = plan.job.launch.model_copy(update=own)
    return replace(plan, job=plan.job.model_copy(update={"launch": launch}))


def _asking(launch: LaunchPlan, request: BenchRequest) -> LaunchPlan:
    files = {**launch.files, launch.run.bench.name: json.dumps(request, indent=1) + "\n"}
    return replace(launch, files=files, request=request)


def _run(launch: LaunchPlan, cluster: Cluster, on_answer: OnAnswer, on_event: OnEvent) -> RunOutcome:
    set_up_run(launch, overwrite=True, resume=False, on_progress=lambda *_: None)
    events = EventLog(launch.run.launcher_log, on_event)
    return run_launch(launch, cluster, on_answer, events.event)


STARTING = "start the ranks"


class PlannedCases(Protocol):
    """The cases of a bench in ranks."""

    @property
    def plan(self) -> Plan:
        """The layout of the ranks."""


@dataclass
class RankBench(ABC):
    """A bench that the ranks of one launch answer, in rounds of all its cases.

    environment, command: for the report; rounds: of a launch; timings: answers of the ranks, each
    of one case in one round; launches: that have begun; hosts: facts of the hosts of the ranks,
    once they have ended; is_stopped: whether Ctrl-C or `mpctl stop` ended them.
    """

    environment: BenchEnvironment
    command: str
    rounds: int
    cases: PlannedCases
    timings: list[Any] = field(default_factory=list, kw_only=True)
    launches: int = field(default=0, kw_only=True)
    hosts: tuple[HostFacts, ...] = field(default=(), kw_only=True)
    is_stopped: bool = field(default=False, kw_only=True)

    timing: ClassVar[str]
    """A description of the rounds, for the progress."""

    @property
    def plan(self) -> Plan:
        """The layout of the ranks."""
        return self.cases.plan

    @property
    @abstractmethod
    def round_timings(self) -> int:
        """Timings of one round."""

    @abstractmethod
    def request(self) -> Any:
        """The request to the ranks, a BenchRequest."""

    @abstractmethod
    def use(self, machine: Machine) -> None:
        """Set cores and GPUs to those of the hosts of the ranks. machine: the smallest of these
        hosts."""

    @abstractmethod
    def report(self) -> BenchReport:
        """Return a report of the measurements so far, as JSON."""

    @property
    def is_complete(self) -> bool:
        """Whether every case was timed in every round; False if the budget or a stop ended the
        bench."""
        wanted = max(self.launches, 1) * self.rounds * self.round_timings
        return not self.is_stopped and len(self.timings) == wanted

    def take(self, answer: Any) -> None:
        """Keep an answer of the ranks: a timing, or an answer before the first timing."""
        self.timings.append(answer)

    def measure(self, run: RunDir, watch: Watch, on_round: Callable[[], None] = lambda: None) -> None:
        """Have the ranks answer, with their files in `run`; called again, its timings are added.
        on_round: called after every round. Raises InputError where the hosts cannot run the ranks,
        RunFailed where a rank fails."""
        before = len(self.timings)
        self.launches += 1

        def take(answer: Any) -> None:
            self.take(answer)
            if done := len(self.timings) - before:
                watch.on_progress(self.timing, done, self.rounds * self.round_timings)
                if done % self.round_timings == 0:
                    on_round()

        watch.on_progress(STARTING, 0, 0)
        ended = probe_answers(self.plan, self.request(), run, on_answer=take, on_event=watch.on_event)
        self.is_stopped, self.hosts = not ended.is_complete, ended.hosts
        self.use(common_machine(ended.hosts))
