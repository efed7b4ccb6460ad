"""Launches the cases of a bench one after the other, repeats alternating, data prepared once."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from mpctl.bench.folder import REPORT, check_folder, take_folder
from mpctl.bench.scaling import Case, Timing, timing_of
from mpctl.errors import InputError, Issue, RunFailed
from mpctl.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.launch.machine import Machine, this_machine
from mpctl.launch.preflight import check_launch, launch_warnings
from mpctl.launch.set_up import Progress, prepare_data, set_up_run
from mpctl.launch.supervise import run_launch
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.rundir.rank_files import StepRecord

MakePlan = Callable[[Mapping[str, Any]], Plan]


class View(Protocol):
    """What shows a run's records and events as they come."""

    def record(self, record: StepRecord) -> None: ...

    def event(self, message: str) -> None: ...


OpenView = Callable[[str, LaunchPlan], AbstractContextManager[View]]


def plan_cases(
    make_plan: MakePlan, cases: Sequence[Case], out: Path, *, overwrite: bool
) -> list[LaunchPlan]:
    """A launch for every case; raises InputError with the issues of all of them, and of the folder
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
    cases: Sequence[Case], launches: Sequence[LaunchPlan], *, out: Path, repeats: int,
    open_view: OpenView, on_progress: Progress,
) -> list[Timing]:  # fmt: skip
    """Time every case `repeats` times, A B C A B C; raises RunFailed at the first that fails."""
    records: list[list[list[StepRecord]]] = [[] for _ in cases]
    take_folder(out)
    shared = _with_data(launches, out, on_progress)
    for repeat in range(repeats):
        for index, (case, launch) in enumerate(zip(cases, shared, strict=True)):
            path = out / f"{case.name}-r{repeat + 1}"
            title = f"world {case.world} (tp {case.tp} x dp {case.dp}), run {repeat + 1}/{repeats}"
            records[index].append(_run_one(launch, path, title, open_view))
    predictions = [launch.job.launch.predicted_step_seconds for launch in shared]
    return [
        timing_of(case, own, predicted)
        for case, own, predicted in zip(cases, records, predictions, strict=True)
    ]


def _with_data(
    launches: Sequence[LaunchPlan], out: Path, on_progress: Progress
) -> list[LaunchPlan]:
    """The launches reading one prepared corpus in `out`."""
    first = launches[0]
    if first.job.data.path is not None:
        return list(launches)
    prepare_data(replace(first, run=RunDir(out)), on_progress)
    return [_reading(launch, (out / "data").resolve()) for launch in launches]


def _reading(launch: LaunchPlan, data: Path) -> LaunchPlan:
    settings = launch.job.data.model_copy(update={"path": str(data)})
    job = launch.job.model_copy(update={"data": settings})
    files = {**launch.files, "job.json": job.model_dump_json(indent=1) + "\n"}
    return replace(launch, job=job, files=files)


def _run_one(launch: LaunchPlan, path: Path, title: str, open_view: OpenView) -> list[StepRecord]:
    own = replace(launch, run=RunDir(path))
    set_up_run(own, overwrite=True, resume=False, on_progress=lambda *_: None)
    with open_view(title, own) as view:
        outcome = run_launch(own, view.record, view.event)
    if outcome.status == "stopped":
        raise KeyboardInterrupt
    if outcome.failure is not None:
        raise RunFailed(f"{title}: {outcome.failure}; its log: {outcome.failure.log}")
    return list(own.run.records())


def environment() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    machine = this_machine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "cores": machine.cores,
        "gpus": machine.gpus,
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "mpctl": version("mpctl"),
    }


def load_warnings(where: dict[str, Any]) -> list[str]:
    """In words, that other programs were using the cores when `environment` was read."""
    load, cores = where["load_at_start"], where["cores"]
    if load <= cores:
        return []
    return [f"the load is {load:.1f} on {cores} core{'s' * (cores > 1)}: other programs take "
            "their time, so these figures are too slow and vary"]  # fmt: skip


def write_report(out: Path, report: dict[str, Any]) -> None:
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
