"""The cases of a bench that trains: each a named job, planned and checked before any of them runs.

Cases with the same corpus, tokenizer and vocabulary share one prepared copy of it in OUT/data. All
issues of all cases are reported at once.

tp 1 and tp 2 of one model read OUT/data/1; a model with another vocabulary reads
OUT/data/2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpctl.core.errors import InputError, Issue, attempt
from mpctl.core.units import plural
from mpctl.measure.bench.report import DATA, check_folder
from mpctl.model.families import special_tokens
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.summary import WARM_UP_STEPS
from mpctl.run.clusters.connect import bench_issues, bench_warnings
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.run.launch.preflight import chosen_device
from mpctl.run.launch.set_up import Progress, prepare_data
from mpctl.spec.job import JobSpec

TIMED_SETTINGS: Overrides = {"training.eval_samples": 0, "checkpoint.interval": 0, "checkpoint.at_end": False}
"""Settings of a job whose steps are timed: no validations, no checkpoints."""


def one_core_each(plan: Plan, machine: Machine) -> Plan:
    """The plan with one thread for each rank on CPU, unless its job sets the threads: the device of
    a CPU cluster is one core, and a single rank must not use the cores of the others."""
    job = plan.job
    if job.launch.threads_per_rank is not None or chosen_device(job, machine) != "cpu":
        return plan
    launch = job.launch.model_copy(update={"threads_per_rank": 1})
    return replace(plan, job=job.model_copy(update={"launch": launch}))


def shared_units(job: JobSpec, machine: Machine) -> int:
    """How many ranks of a job one host can run side by side: its GPUs, or its cores by the threads
    of a rank."""
    if chosen_device(job, machine) == "cuda":
        return max(1, machine.gpus)
    return max(1, machine.cores // (job.launch.threads_per_rank or 1))


@dataclass(frozen=True)
class RunCase:
    """A job to be run. name: unique among the cases, with characters that a file name may have;
    make_plan: returns the legal plan, or raises InputError with every issue; title: the case as
    shown to people, by default the name."""

    name: str
    make_plan: Callable[[], Plan]
    title: str = ""


@dataclass(frozen=True)
class PlannedCase:
    """A case with its plan, and the launch that every round repeats in a separate directory."""

    name: str
    title: str
    plan: Plan
    launch: LaunchPlan

    @property
    def job(self) -> JobSpec:
        """The launched job, with device and threads filled in."""
        return self.launch.job

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks together in one step. Raises AssertionError without a model."""
        assert self.plan.layout is not None, "a case trains a model"
        return self.plan.layout.tokens_per_step


def plan_cases(cases: Sequence[RunCase], out: Path, machine: Machine, *, overwrite: bool) -> list[PlannedCase]:
    """Every case with its plan, in this order; on CPU with one thread a rank.

    machine: this one, which runs those that name no other hosts. Raises InputError with the issues
    of all cases and of the folder `out` together.
    """
    issues: list[Issue] = list(check_folder(out, overwrite=overwrite))
    planned: list[PlannedCase] = []
    for case in cases:
        made = attempt(issues, case.make_plan)
        if made is None:
            continue
        plan = one_core_each(made, machine)
        issues += [*bench_issues(plan, machine), *_too_short(plan)]
        if not issues:
            planned.append(_planned(case, plan, machine, out))
    if issues:
        raise InputError(dict.fromkeys(issues))
    return planned


def _too_short(plan: Plan) -> Iterator[Issue]:
    steps = plan.job.training.steps
    if steps <= WARM_UP_STEPS:
        yield Issue(
            "bench-steps",
            "training.steps",
            f"of {plural(steps, 'step')} none counts: the first {WARM_UP_STEPS} warm up",
            f"use --steps {WARM_UP_STEPS + 1} or more",
        )


def _planned(case: RunCase, plan: Plan, machine: Machine, out: Path) -> PlannedCase:
    warnings = tuple(bench_warnings(plan, machine))
    launch = plan_launch(plan, RunDir(out / case.name), machine, warnings=warnings)
    return PlannedCase(case.name, case.title or case.name, plan, launch)


def case_warnings(cases: Iterable[PlannedCase]) -> list[str]:
    """The warnings before the cases run, each once."""
    return list(dict.fromkeys(text for case in cases for text in case.launch.warnings))


def with_data(cases: Sequence[PlannedCase], out: Path, on_progress: Progress) -> Iterator[PlannedCase]:
    """The cases with prepared data: those that their jobs name, or a corpus that is prepared here
    in OUT/data, once for all cases that read the same of it."""
    folders: dict[object, Path] = {}
    for case in cases:
        if case.job.data.path is not None:
            yield case
            continue
        key = _corpus_key(case.job)
        if key not in folders:
            folders[key] = (out / DATA / str(len(folders) + 1)).resolve()
            prepare_data(case.launch, on_progress, folders[key])
        yield replace(case, launch=_with_path(case.launch, folders[key]))


def _corpus_key(job: JobSpec) -> tuple[object, ...]:
    """Everything that prepared data depend on."""
    assert job.model is not None, "a case trains a model"
    data = job.data.model_dump_json()
    return data, job.model.vocab, tuple(special_tokens(job.model)), job.training.seed


def _with_path(launch: LaunchPlan, data: Path) -> LaunchPlan:
    settings = launch.job.data.model_copy(update={"path": str(data)})
    job = launch.job.model_copy(update={"data": settings})
    files = {**launch.files, "job.json": job.model_dump_json(indent=1) + "\n"}
    return replace(launch, job=job, files=files)
