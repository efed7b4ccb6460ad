"""A bench in ranks as a launch: its workers measure instead of train, on the hosts of any backend.

A launch of a bench is one of a training with RUN/bench.json beside RUN/job.json. The workers answer
that request (runtime/measure.py) and rank 0 appends each answer to RUN/answers.jsonl. Hosts,
torchrun, hangs, failures and signals are the launcher's own; no data are prepared, nothing is
saved, and a failure is not followed by another attempt.

By hand, two ranks that answer {"task": "layers", "rounds": 3, ...} for two cases write two answers
about sizes, one for the unsharded layer, and six timings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from mpctl.errors import InputError, Issue, RunFailed
from mpctl.launch.backends.registry import find_backend
from mpctl.launch.cluster import Cluster
from mpctl.launch.control.host_checks import common_machine
from mpctl.launch.event_log import EventLog
from mpctl.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.launch.node.machine import this_machine
from mpctl.launch.preflight import HostCheck, check_ranks, chosen_device
from mpctl.launch.record_reader import OnAnswer
from mpctl.launch.set_up import set_up_run
from mpctl.launch.supervise import run_launch
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.rundir.launcher import this_launcher

OnEvent = Callable[[str], None]


def require_probes(plans: Sequence[Plan]) -> None:
    """Raises InputError with every reason, found without contacting a host, why ranks of these
    plans cannot be started to measure."""
    issues = dict.fromkeys(issue for plan in plans for issue in _refusals(_measuring(plan)))
    if issues:
        raise InputError(issues)


def probe_answers(
    plan: Plan, request: Mapping[str, object], run: RunDir, *, on_answer: OnAnswer,
    on_event: OnEvent,
) -> bool:  # fmt: skip
    """Have the ranks of a legal plan answer a request; what an earlier bench left in `run` is
    replaced.

    on_answer: called with each answer of rank 0 as it comes; on_event: with messages for people.
    Returns whether all answers came: False after Ctrl-C, SIGTERM, SIGHUP or `mpctl stop`. Raises
    InputError when the hosts cannot run the plan, RunFailed when a rank failed.
    """
    with _connected(_measuring(plan), request, run, on_event) as (launch, cluster), run.locked():
        set_up_run(launch, overwrite=True, resume=False, on_progress=lambda *_: None)
        events = EventLog(run.launcher_log, on_event)
        outcome = run_launch(launch, cluster, on_answer, events.event)
    if outcome.failure is not None:
        raise RunFailed(f"{outcome.failure}; its log: {outcome.failure.log}")
    return outcome.status == "finished"


def _measuring(plan: Plan) -> Plan:
    """The plan without what concerns training alone: restarts, fewer hosts, the memory of a
    step."""
    own = {"max_restarts": 0, "elastic": False, "check_memory": False}
    launch = plan.job.launch.model_copy(update=own)
    return replace(plan, job=plan.job.model_copy(update={"launch": launch}))


@contextmanager
def _connected(
    plan: Plan, request: Mapping[str, object], run: RunDir, on_event: OnEvent
) -> Iterator[tuple[LaunchPlan, Cluster]]:
    """The hosts, and the launch that is ready to run on them."""
    backend = find_backend(plan.job, os.environ)
    require_probes([plan])
    with backend.connect(plan, run, on_event) as cluster:
        hosts = cluster.hosts
        machine = common_machine(hosts)
        if issues := cluster.check(plan, chosen_device(plan.job, machine)):
            raise InputError(issues)
        launch = plan_launch(plan, run, machine, hosts=len(hosts))
        files = {**launch.files, run.bench.name: json.dumps(request, indent=1) + "\n"}
        names = [host.name for host in hosts]
        launcher = this_launcher(backend.name, job_id=backend.job_id, hosts=names)
        yield replace(launch, files=files, launcher=launcher, request=request), cluster


def _refusals(plan: Plan) -> list[Issue]:
    """Why ranks of this plan cannot be started from here; the hosts have not been asked yet."""
    backend = find_backend(plan.job, os.environ)
    host_check: HostCheck | None = None if backend.name == "local" else _no_host_check
    return [*check_ranks(plan, this_machine(), host_check), *backend.check(plan)]


def _no_host_check(plan: object, device: object) -> list[Issue]:
    """A HostCheck for hosts that are not known yet."""
    return []
