"""A bench in ranks as a launch: its workers measure instead of train, on the hosts of any backend.

A launch of a bench is one of a training with RUN/bench.json beside RUN/job.json. The workers answer
that request (runtime/probes/measure.py) and rank 0 appends each answer to RUN/answers.jsonl. Hosts,
torchrun, hangs, failures and signals are the launcher's own; no data are prepared, nothing is
saved, and a failure is not followed by another attempt.

By hand, two ranks that answer {"task": "layers", "rounds": 3, ...} for two cases write two answers
about sizes, one for the unsharded layer, and six timings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpctl.clusters.backend import OnEvent
from mpctl.clusters.connect import bench_issues, connected
from mpctl.errors import InputError, RunFailed
from mpctl.hosts.checks import common_machine
from mpctl.hosts.machine import HostFacts, Machine, this_machine
from mpctl.launch.cluster import Cluster
from mpctl.launch.follow import EventLog, OnAnswer
from mpctl.launch.launch_plan import LaunchPlan
from mpctl.launch.set_up import set_up_run
from mpctl.launch.summary import summarise
from mpctl.launch.supervise import RunOutcome, run_launch
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.rundir.requests import BenchRequest
from mpctl.rundir.summary import write_summary


@dataclass(frozen=True)
class Probed:
    """How a bench in ranks ended. is_complete: False after Ctrl-C, SIGTERM, SIGHUP or `mpctl stop`;
    hosts: the facts of those that had the ranks."""

    is_complete: bool
    hosts: tuple[HostFacts, ...]

    @property
    def machine(self) -> Machine:
        """The least that each host has."""
        return common_machine(self.hosts)


def require_probes(plans: Sequence[Plan]) -> None:
    """Raises InputError with every reason, found without contacting a host, why ranks of these
    plans cannot be started to measure."""
    machine = this_machine()
    issues = [
        issue
        for plan in plans
        for issue in bench_issues(_measuring(plan), machine, only_measures=True)
    ]
    if issues:
        raise InputError(dict.fromkeys(issues))


def probe_answers(
    plan: Plan, request: BenchRequest, run: RunDir, *, on_answer: OnAnswer, on_event: OnEvent
) -> Probed:
    """Have the ranks of a legal plan answer a request; what an earlier bench left in `run` is
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
    """The plan without what concerns training alone: restarts, fewer hosts, the memory of a
    step."""
    own = {"max_restarts": 0, "elastic": False, "check_memory": False}
    launch = plan.job.launch.model_copy(update=own)
    return replace(plan, job=plan.job.model_copy(update={"launch": launch}))


def _asking(launch: LaunchPlan, request: BenchRequest) -> LaunchPlan:
    files = {**launch.files, launch.run.bench.name: json.dumps(request, indent=1) + "\n"}
    return replace(launch, files=files, request=request)


def _run(
    launch: LaunchPlan, cluster: Cluster, on_answer: OnAnswer, on_event: OnEvent
) -> RunOutcome:
    set_up_run(launch, overwrite=True, resume=False, on_progress=lambda *_: None)
    events = EventLog(launch.run.launcher_log, on_event)
    return run_launch(launch, cluster, on_answer, events.event)
