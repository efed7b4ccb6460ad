"""Launches the cases of a bench in alternation; their data are prepared once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mpctl.bench.folder import check_folder, take_folder
from mpctl.bench.scaling import Case, Timing, timing_of
from mpctl.errors import InputError, Issue, RunFailed
from mpctl.launch.backends.local import LocalCluster
from mpctl.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.launch.node.machine import Machine, this_machine
from mpctl.launch.preflight import check_launch, launch_warnings
from mpctl.launch.set_up import Progress, prepare_data, set_up_run
from mpctl.launch.supervise import run_launch
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.rundir.rank_files import StepRecord

MakePlan = Callable[[Mapping[str, object]], Plan]


class RecordView(Protocol):
    """What shows the records and events of a run as they come."""

    def record(self, record: StepRecord) -> None:
        """Show the record of a step."""

    def event(self, message: str) -> None:
        """Show a message."""


OpenView = Callable[[str, LaunchPlan], AbstractContextManager[RecordView]]


def plan_cases(
    make_plan: MakePlan, cases: Sequence[Case], out: Path, *, overwrite: bool
) -> list[LaunchPlan]:
    """A launch for every case. Raises InputError with the issues of all cases and of the folder
    that they write, at once."""
    machine = this_machine()
    issues: list[Issue] = list(check_folder(out, overwrite=overwrite))
    launches: list[LaunchPlan] = []
    for case in cases:
        try:
            plan = make_plan(case.settings)
        except InputError as error:
            issues += error.issues
            continue
        issues += check_launch(plan, machine)
        if not issues:
            launches.append(_launch(plan, machine, out / case.name))
    if issues:
        raise InputError(dict.fromkeys(issues))
    return launches


def _launch(plan: Plan, machine: Machine, path: Path) -> LaunchPlan:
    warnings = tuple(launch_warnings(plan.job, machine))
    return plan_launch(plan, RunDir(path), machine, warnings=warnings)


def run_cases(
    cases: Sequence[Case],
    launches: Sequence[LaunchPlan],
    *,
    out: Path,
    repeats: int,
    open_view: OpenView,
    on_progress: Progress,
) -> list[Timing]:
    """Run every case `repeats` times, in the order A B C A B C, and time its steps. Raises
    RunFailed at the first run that fails."""
    records: list[list[list[StepRecord]]] = [[] for _ in cases]
    take_folder(out)
    shared = _with_data(launches, out, on_progress)
    for repeat in range(1, repeats + 1):
        for index, (case, launch) in enumerate(zip(cases, shared, strict=True)):
            run = RunDir(out / f"{case.name}-r{repeat}")
            title = f"world {case.world} (tp {case.tp} x dp {case.dp}), run {repeat}/{repeats}"
            records[index].append(_run_one(replace(launch, run=run), title, open_view))
    predictions = [launch.job.launch.predicted_step_seconds for launch in shared]
    return [timing_of(*each) for each in zip(cases, records, predictions, strict=True)]


def _with_data(
    launches: Sequence[LaunchPlan], out: Path, on_progress: Progress
) -> list[LaunchPlan]:
    """The launches, all with the same prepared data: the job's, or a corpus prepared in `out`."""
    first = launches[0]
    if first.job.data.path is not None:
        return list(launches)
    prepare_data(replace(first, run=RunDir(out)), on_progress)
    return [_with_path(launch, RunDir(out).data.resolve()) for launch in launches]


def _with_path(launch: LaunchPlan, data: Path) -> LaunchPlan:
    settings = launch.job.data.model_copy(update={"path": str(data)})
    job = launch.job.model_copy(update={"data": settings})
    files = {**launch.files, "job.json": job.model_dump_json(indent=1) + "\n"}
    return replace(launch, job=job, files=files)


def _run_one(launch: LaunchPlan, title: str, open_view: OpenView) -> list[StepRecord]:
    set_up_run(launch, overwrite=True, resume=False, on_progress=lambda *_: None)
    with open_view(title, launch) as view:
        outcome = run_launch(launch, LocalCluster.of(launch.run), view.record, view.event)
    if outcome.status == "stopped":
        raise KeyboardInterrupt
    if outcome.failure is not None:
        raise RunFailed(f"{title}: {outcome.failure}; its log: {outcome.failure.log}")
    return list(launch.run.records())
