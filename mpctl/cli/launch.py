"""`mpctl launch`: run a job on exactly the layout that `mpctl plan` shows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from mpctl.cli.options import JobSource, typed_command, with_job

if TYPE_CHECKING:
    from mpctl.launch.launch_plan import LaunchPlan
    from mpctl.launch.resume import Resumption
    from mpctl.launch.supervise import RunOutcome
    from mpctl.planning.plan import Plan
    from mpctl.rundir.directory import RunDir

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


RunDirOption = Annotated[
    Path | None, typer.Option(help="Directory of the run; by default a new runs/NAME.")
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(
        help="Where ranks run; cpu tries out any layout on this machine's cores.",
        show_default=False,
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the exact command and environment; start nothing.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the run in --run-dir.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the run in --run-dir.")]
RehearseOption = Annotated[
    bool,
    typer.Option(
        "--rehearse",
        help="Simulate one step of one rank per pipeline stage on "
        "fake tensors, for any world size; compare it with the plan and the "
        "device's memory.",
    ),
]
RankOption = Annotated[
    int | None,
    typer.Option(help="With --rehearse: simulate this rank instead.", show_default=False),
]
TensorboardOption = Annotated[
    bool | None,
    typer.Option(
        "--tensorboard/--no-tensorboard",
        show_default=False,
        help="Also write RUN/tensorboard while training.",
    ),
]
CsvOption = Annotated[
    bool | None,
    typer.Option(
        "--csv/--no-csv", show_default=False, help="Also write RUN/metrics.csv while training."
    ),
]
AsJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the run's summary as JSON on stdout.")
]


@app.command()
@with_job
def launch(
    job: JobSource,
    run_dir: RunDirOption = None,
    device: DeviceOption = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    rehearse: RehearseOption = False,
    rank: RankOption = None,
    tensorboard: TensorboardOption = None,
    csv: CsvOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Train JOB: prepare the data, start the ranks, watch them, leave no process behind."""
    if rehearse or rank is not None:
        from mpctl.cli.rehearse import require_alone, run_rehearsal

        flags = {"--run-dir": run_dir, "--dry-run": dry_run, "--resume": resume,
                 "--overwrite": overwrite, "--tensorboard": tensorboard, "--csv": csv}  # fmt: skip
        require_alone(rehearse, [name for name, value in flags.items() if value])
        run_rehearsal(job, device, rank, as_json=as_json)
    job = job.with_settings({"launch.tensorboard": tensorboard, "launch.csv": csv})
    plan, run = _resolve(job, run_dir, device, resume=resume, overwrite=overwrite)
    resumption = _find_resumption(run) if resume else None
    if resumption and resumption.folder and resumption.step >= plan.job.training.steps:
        _require_same_model(plan, resumption)
        _say_finished(resumption, as_json=as_json)
        return
    prepared = _check(plan, run, resumption, overwrite=overwrite)
    from mpctl.render.errors import print_warnings

    print_warnings(list(prepared.warnings))
    if dry_run:
        _print_dry_run(prepared, as_json=as_json)
        return
    _train(plan, prepared, resume=resume, overwrite=overwrite, as_json=as_json)


def _train(
    plan: Plan, prepared: LaunchPlan, *, resume: bool, overwrite: bool, as_json: bool
) -> NoReturn:
    """Run a checked launch to its end; exits with the run's exit code."""
    from mpctl.launch.summary import summarise
    from mpctl.render.json import print_json
    from mpctl.render.run import print_failure, print_summary
    from mpctl.rundir.summary import write_summary

    run = prepared.run
    with run.locked():
        outcome = _run_ranks(prepared, resume=resume, overwrite=overwrite)
        summary = summarise(plan, prepared, outcome, command=typed_command())
        write_summary(run.summary, summary)
    with suppress(OSError):  # the reader of the output may be gone; the exit code is the run's
        if outcome.failure is not None:
            print_failure(outcome.failure, run=str(run.path), step=run.last_checkpoint())
        if as_json:
            print_json(summary)
        else:
            print_summary(summary, str(run.path))
    raise typer.Exit(outcome.exit_code)


def _run_ranks(prepared: LaunchPlan, *, resume: bool, overwrite: bool) -> RunOutcome:
    """Prepare the directory and the data, start the ranks, show what they report."""
    from mpctl.cli.signals import ended_by_signals
    from mpctl.launch.follow import follow
    from mpctl.launch.set_up import set_up_run
    from mpctl.launch.supervise import run_launch
    from mpctl.render.data import data_warnings
    from mpctl.render.errors import print_warnings
    from mpctl.render.run import RunView
    from mpctl.render.tasks import TaskBar
    from mpctl.rundir.metrics import foreign_lines, foreign_text

    run, job = prepared.run, prepared.job
    with ended_by_signals("no rank was started"), TaskBar(lines=True) as bar:
        data = set_up_run(prepared, overwrite=overwrite, resume=resume, on_progress=bar.update)
    print_warnings(data_warnings(data))
    steps, predicted = job.training.steps, job.launch.predicted_step_seconds
    with RunView(steps, predicted, done=run.last_checkpoint()) as view:
        follower = follow(run, job, view.event, then=view.record)
        outcome = run_launch(prepared, follower.record, view.event)
    if numbers := foreign_lines(run.metrics):
        print_warnings([foreign_text(run.metrics, numbers)])
    return outcome


def _resolve(
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
        resumed = JobSource(source, {**_reopened(job.overrides), **job.overrides})
        return resumed.plan(more), RunDir(run_dir)
    plan = job.plan(more)
    run = RunDir(run_dir) if run_dir else free_run_dir(plan.job.name or _name_of(job.source))
    return plan, run


def _name_of(source: str | None) -> str:
    """The name for a job without a name: that of its preset or its file."""
    return Path(source).stem if source else "run"


def _reopened(overrides: Mapping[str, object]) -> dict[str, object]:
    """The settings that job.json has filled in and that must be derived again for a new layout.
    The global batch stays, so that the run continues as the same run."""
    axes = ("parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp")
    if not {*axes, "cluster.nodes", "cluster.gpus_per_node"} & set(overrides):
        return {}
    return dict.fromkeys(("parallel.dp", "cluster.gpus_per_node", "launch.threads_per_rank"))


def _find_resumption(run: RunDir) -> Resumption:
    """The checkpoint that the run continues from, with a bar while it is verified."""
    from mpctl.launch.resume import find_resumption
    from mpctl.render.tasks import TaskBar

    with TaskBar(after=1.0) as bar:
        return find_resumption(run, bar.update)


def _require_same_model(plan: Plan, resumption: Resumption) -> None:
    from mpctl.errors import InputError
    from mpctl.launch.resume import job_before, model_issues

    run = resumption.run
    if issues := list(model_issues(plan.job, job_before(run), run)):
        raise InputError(issues)


def _say_finished(resumption: Resumption, *, as_json: bool) -> None:
    """Report that a run has trained all its steps; it is not changed."""
    from mpctl.launch.summary import finished_summary
    from mpctl.render.errors import print_warnings
    from mpctl.render.json import print_json

    run, step = resumption.run, resumption.step
    print_warnings(
        [f"{run.path} is already at step {step}; use --steps N (more than {step}) to go on"]
    )
    if as_json:
        print_json(finished_summary(run, step))


def _check(
    plan: Plan, run: RunDir, resumption: Resumption | None, *, overwrite: bool
) -> LaunchPlan:
    """The launch, when nothing prevents it. Raises InputError with every reason not to start."""
    from mpctl.errors import InputError
    from mpctl.launch.launch_plan import plan_launch, resolved_job
    from mpctl.launch.node.machine import this_machine
    from mpctl.launch.preflight import (
        check_launch,
        check_replaced,
        check_run_dir,
        launch_warnings,
    )
    from mpctl.launch.resume import changed_settings, job_before

    machine = this_machine()
    issues = check_launch(plan, machine, run, resumption=resumption, replaced=overwrite)
    issues += check_replaced(plan.job, run) if overwrite else []
    try:
        check_run_dir(run, overwrite=overwrite, resume=resumption is not None)
    except InputError as error:
        issues += error.issues
    if issues:
        raise InputError(issues)
    said = launch_warnings(plan.job, machine, resumption=resumption)
    warnings = (*(str(c.issue) for c in plan.warnings), *said)
    if resumption is None:
        return plan_launch(plan, run, machine, warnings=warnings)
    changed = changed_settings(resolved_job(plan, machine), job_before(run), resumption)
    return plan_launch(
        plan, run, machine, warnings=(*warnings, *resumption.warnings(), *changed),
        damaged=tuple(path for path, _ in resumption.damaged),
    )  # fmt: skip


def _print_dry_run(prepared: LaunchPlan, *, as_json: bool) -> None:
    from mpctl.launch.node.address import free_port
    from mpctl.render.console import say
    from mpctl.render.json import print_json

    port = free_port()
    if as_json:
        print_json(prepared.document(port))
        return
    files = ", ".join(prepared.files)
    say(f"# writes {files} and the records of the run into {prepared.run.path}/")
    say(prepared.text(port))
