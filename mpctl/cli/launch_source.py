"""What `mpctl launch` is to run: a new job, or a run that is continued from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpctl.cli.options import JobSource

if TYPE_CHECKING:
    from mpctl.launch.resume import Resumption
    from mpctl.planning.plan import Plan
    from mpctl.rundir.directory import RunDir


def resolve(
    job: JobSource, run_dir: Path | None, device: str | None, *, resume: bool, overwrite: bool
) -> tuple[Plan, RunDir]:
    """The plan and the run directory; a resumed run brings its own job."""
    from mpctl.errors import InputError
    from mpctl.launch.preflight import check_run_dir
    from mpctl.rundir.directory import RunDir, free_run_dir

    if resume and overwrite:
        raise InputError.of("usage", "--resume", "--resume and --overwrite exclude each other",
                            "use one of them")  # fmt: skip
    more = {} if device is None else {"launch.device": device}
    if resume:
        if run_dir is None:
            raise InputError.of("usage", "--resume", "no run is named", "add --run-dir RUN")
        check_run_dir(RunDir(run_dir), overwrite=False, resume=True)
        source = job.source or str(RunDir(run_dir).document("job.json"))
        overrides = {**_grown(RunDir(run_dir), job), **job.overrides}
        resumed = JobSource(source, {**_reopened(overrides), **overrides})
        return resumed.plan(more), RunDir(run_dir)
    plan = job.plan(more)
    run = RunDir(run_dir) if run_dir else free_run_dir(plan.job.name or _name_of(job.source))
    return plan, run


def _name_of(source: str | None) -> str:
    """The name for a job without a name: that of its preset or its file."""
    return Path(source).stem if source else "run"


def _grown(run: RunDir, job: JobSource) -> dict[str, object]:
    """An elastic run that ended on fewer hosts is resumed on all nodes it was planned for, unless
    a job is named."""
    from mpctl.launch.resume import job_before

    before = None if job.source else job_before(run)
    if before is None or before.launch.max_nodes is None:
        return {}
    per_node = {"cluster.gpus_per_node": before.cluster.gpus_per_node}
    return {"cluster.nodes": before.launch.max_nodes, **per_node, "launch.max_nodes": None}


def _reopened(overrides: Mapping[str, object]) -> dict[str, object]:
    """The settings that job.json has filled in and that must be derived again for a new layout.
    The global batch stays, so that the run continues as the same run."""
    axes = ("parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp")
    opened: list[str] = []
    if {*axes, "cluster.nodes", "cluster.gpus_per_node"} & set(overrides):
        opened += ["parallel.dp", "cluster.gpus_per_node", "launch.threads_per_rank"]
    if {"parallel.tp", "parallel.tensor_mode"} & set(overrides):
        opened.append("parallel.tensor_depth")
    return dict.fromkeys(opened)


def require_same_model(plan: Plan, resumption: Resumption) -> None:
    """Raises InputError when a resumed run would have another model than before."""
    from mpctl.errors import InputError
    from mpctl.launch.resume import job_before, model_issues

    run = resumption.run
    if issues := list(model_issues(plan.job, job_before(run), run)):
        raise InputError(issues)


def say_finished(resumption: Resumption, *, as_json: bool) -> None:
    """Report that a run has trained all its steps; it is not changed."""
    from mpctl.launch.summary import finished_summary
    from mpctl.render.output import print_json, print_warnings

    run, step = resumption.run, resumption.step
    print_warnings(
        [f"{run.path} is already at step {step}; use --steps N (more than {step}) to go on"]
    )
    if as_json:
        print_json(finished_summary(run, step))
