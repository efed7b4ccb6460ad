"""`mpctl launch`: run a job on exactly the layout that `mpctl plan` shows."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from mpctl.cli import complete
from mpctl.cli.options import AsJsonOption, JobSource, OtherOwnerOption, typed_command, with_job
from mpctl.cli.via import ViaOption, submit_there

if TYPE_CHECKING:
    from mpctl.plan.planning.plan import Plan
    from mpctl.records.rundir.directory import RunDir
    from mpctl.run.launch.resume import Resumption


RunDirOption = Annotated[
    Path | None, typer.Option(help="Directory of the run; by default a new runs/NAME.", autocompletion=complete.run)
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where ranks run; cpu runs any layout on this machine's cores.", show_default=False),
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
        help="Simulate one step of one rank per pipeline stage on fake tensors, for any world "
        "size; compare it with the plan and the device's memory. Exit code 3: a rank leaves "
        "less memory free than the headroom.",
    ),
]
RankOption = Annotated[
    int | None, typer.Option(help="With --rehearse: simulate this rank instead.", show_default=False)
]
AuditOption = Annotated[
    bool,
    typer.Option(
        "--audit",
        help="With --rehearse: also count the kernels that each module launches and the bytes "
        "that they move on a GPU, compared with the least possible; no GPU is needed.",
    ),
]
TensorboardOption = Annotated[
    bool | None,
    typer.Option(
        "--tensorboard/--no-tensorboard", show_default=False, help="Also write RUN/tensorboard while training."
    ),
]
CsvOption = Annotated[
    bool | None, typer.Option("--csv/--no-csv", show_default=False, help="Also write RUN/metrics.csv while training.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        metavar="STEPS",
        show_default=False,
        help="Record a trace of every rank in these steps, such as 5-7, for `mpctl bench trace`. "
        "The first two steps are slower than others.",
    ),
]
OnOption = Annotated[
    Literal["auto", "local", "slurm", "ssh", "kubernetes", "torchrun"] | None,
    typer.Option(
        help="Where ranks are started: on this host, on the hosts of an allocation or hostfile, "
        "or in a world that another program started.",
        show_default=False,
    ),
]
SubmitOption = Annotated[bool, typer.Option("--submit", help="Hand the run to the scheduler and return at once.")]
HostfileOption = Annotated[
    Path | None,
    typer.Option(
        help="Use ssh (--on ssh) and the hosts of this file, one line `HOST slots=N` for each.", show_default=False
    ),
]
IncludeOption = Annotated[
    str | None, typer.Option(help="Use only these hosts of the hostfile: n1@n2:0,1.", show_default=False)
]
ExcludeOption = Annotated[
    str | None, typer.Option(help="Leave out these hosts of the hostfile: n1@n2:0,1.", show_default=False)
]
ProgramOption = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help='Run this on every rank instead of mpctl\'s training: "python train.py --lr 1e-4". '
        "No shell reads it; {megatron} in it becomes the plan's flags for that trainer.",
        show_default=False,
    ),
]


@with_job
def launch(
    context: typer.Context,
    job: JobSource,
    run_dir: RunDirOption = None,
    device: DeviceOption = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    rehearse: RehearseOption = False,
    rank: RankOption = None,
    audit: AuditOption = False,
    tensorboard: TensorboardOption = None,
    csv: CsvOption = None,
    profile: ProfileOption = None,
    as_json: AsJsonOption = False,
    on: OnOption = None,
    submit: SubmitOption = False,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    program: ProgramOption = None,
    allow_other_owner: OtherOwnerOption = False,
    via: ViaOption = None,
) -> None:
    """Train JOB: prepare the data, start the ranks, watch them, leave no process behind."""
    if rehearse or audit or rank is not None:
        flags = {
            "--run-dir": run_dir,
            "--dry-run": dry_run,
            "--resume": resume,
            "--overwrite": overwrite,
            "--tensorboard": tensorboard,
            "--csv": csv,
            "--profile": profile,
            "--on": on,
            "--submit": submit,
            "--hostfile": hostfile,
            "--via": via,
            "--program": program,
        }
        own = "--audit" if audit else "--rank"
        require_alone(rehearse, own, [name for name, value in flags.items() if value])
        run_rehearsal(job, device, rank, audits=audit, as_json=as_json)
    settings: dict[str, object] = {
        "launch.tensorboard": tensorboard,
        "launch.csv": csv,
        "launch.profile": profile,
        "launch.on": on,
        **ssh_settings(on, hostfile, include, exclude),
        "launch.program": None if program is None else program_argv(program),
    }
    if via is not None:
        job = job.with_settings({**settings, "launch.device": device})
        submit_there(via, context, job, run_dir, submit=submit, resume=resume)
    from mpctl.cli.launch_run import dismiss_followers, follow_if_joined

    follow_if_joined(job, run_dir, on, resume=resume, is_dry=dry_run or submit, is_trusted=allow_other_owner)
    from mpctl.cli.launch_array import has_array, submit_array
    from mpctl.cli.launch_run import Launch
    from mpctl.run.history.submitted import refusal_recorded
    from mpctl.run.launch.resume import find_resumption

    with refusal_recorded(run_dir if resume else None, os.environ):
        job = job.with_settings(settings)
        plan, run = resolve(job, run_dir, device, resume=resume, overwrite=overwrite)
        if submit and not resume and has_array(plan):
            submit_array(job, plan, run, device, overwrite=overwrite, dry_run=dry_run, as_json=as_json)
            return
        resumption = find_resumption(run) if resume else None
        done = resumption.step if resumption and resumption.folder else 0
        if resumption and done >= plan.job.training.steps and not plan.job.launch.program:
            require_same_model(plan, resumption)
            say_finished(resumption, as_json=as_json)
            dismiss_followers(plan, run)
            return
        launch = Launch(plan, run, resumption, overwrite=overwrite, as_json=as_json)
        if submit:
            launch.submit(dry_run=dry_run)
        elif dry_run:
            launch.print_commands()
        else:
            launch.train()


def ssh_settings(
    on: str | None, hostfile: Path | None, include: str | None, exclude: str | None
) -> dict[str, str | None]:
    """The settings from the options about hosts; a hostfile without --on means ssh."""
    if hostfile is None:
        return {"launch.ssh.include": include, "launch.ssh.exclude": exclude}
    return {
        "launch.on": on or "ssh",
        "launch.ssh.hostfile": str(hostfile),
        "launch.ssh.include": include,
        "launch.ssh.exclude": exclude,
    }


def program_argv(command: str) -> list[str]:
    """The words of a command line as a shell reads them; nothing in them is expanded. Raises
    InputError where there are none, or a quote is not closed."""
    from mpctl.core.errors import InputError

    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError.of("bad-syntax", "--program", f"{command!r}: {error}") from None
    if not words:
        hint = 'name a program: --program "python train.py"'
        raise InputError.of("bad-syntax", "--program", "there is no program in it", hint)
    return words


def resolve(
    job: JobSource, run_dir: Path | None, device: str | None, *, resume: bool, overwrite: bool
) -> tuple[Plan, RunDir]:
    """The plan and the run directory; a resumed run uses the job that it has saved."""
    from mpctl.core.errors import InputError
    from mpctl.records.rundir.directory import RunDir, free_run_dir
    from mpctl.run.launch.preflight import check_run_dir

    if resume and overwrite:
        raise InputError.of("usage", "--resume", "--resume and --overwrite exclude each other", "use one of them")
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
    return Path(source).stem if source and source != "-" else "run"


def _grown(run: RunDir, job: JobSource) -> dict[str, object]:
    """The settings that resume an elastic run, if it ended on fewer hosts, on all nodes that it was
    planned for; none where a job is named."""
    from mpctl.run.launch.resume import job_before

    before = None if job.source else job_before(run)
    if before is None or before.launch.max_nodes is None:
        return {}
    per_node = {"cluster.gpus_per_node": before.cluster.gpus_per_node}
    return {"cluster.nodes": before.launch.max_nodes, **per_node, "launch.max_nodes": None}


def _reopened(overrides: Mapping[str, object]) -> dict[str, object]:
    """Settings filled in in job.json that must be derived again for a new layout. The global batch
    stays, so that it remains the same run."""
    axes = ("parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp")
    opened: list[str] = []
    if {*axes, "cluster.nodes", "cluster.gpus_per_node"} & set(overrides):
        opened += ["parallel.dp", "cluster.gpus_per_node", "launch.threads_per_rank"]
    if {"parallel.tp", "parallel.tensor_mode"} & set(overrides):
        opened.append("parallel.tensor_depth")
    return dict.fromkeys(opened)


def require_same_model(plan: Plan, resumption: Resumption) -> None:
    """Raises InputError when a resumed run would have a different model."""
    from mpctl.core.errors import InputError
    from mpctl.run.launch.resume import job_before, model_issues

    run = resumption.run
    if issues := list(model_issues(plan.job, job_before(run), run)):
        raise InputError(issues)


def say_finished(resumption: Resumption, *, as_json: bool) -> None:
    """Report that a run has trained all its steps; it is not changed."""
    from mpctl.render.output import print_json, print_warnings
    from mpctl.run.launch.summary import finished_summary

    run, step = resumption.run, resumption.step
    print_warnings([f"{run.path} is already at step {step}; use --steps N (more than {step}) to go on"])
    if as_json:
        print_json(finished_summary(run, step))


def require_alone(rehearse: bool, own: str, others: list[str]) -> None:
    """Raises InputError for `own`, an option of rehearsals, without --rehearse, and for options
    that have no effect on a rehearsal."""
    from mpctl.core.errors import InputError

    if not rehearse:
        raise InputError.of("usage", own, f"{own} is of a rehearsal only", "add --rehearse")
    if others:
        raise InputError.of(
            "usage", "--rehearse", f"has no use for {', '.join(others)}: a rehearsal writes nothing", "leave it out"
        )


def run_rehearsal(job: JobSource, device: str | None, rank: int | None, *, audits: bool, as_json: bool) -> NoReturn:
    """Rehearse a job, print the document, exit with its exit code (run/launch/rehearse.py)."""
    from mpctl.core.errors import InputError
    from mpctl.render.output import print_json, print_warnings
    from mpctl.render.rehearsal import RehearsalView, print_rehearsal
    from mpctl.run.hosts.machine import this_machine
    from mpctl.run.launch.rehearse import check_rehearsal, chosen_ranks, exit_code, rehearse

    plan, machine = job.plan({} if device is None else {"launch.device": device}), this_machine()
    issues = check_rehearsal(plan, machine)
    if issues:
        raise InputError(issues)
    ranks = chosen_ranks(plan.require_legal(), rank)
    print_warnings([str(check.issue) for check in plan.warnings])
    with RehearsalView(len(ranks)) as view:
        document = rehearse(plan, machine, ranks, command=typed_command(), on_rank=view.show, audits=audits)
    if as_json:
        print_json(document)
    else:
        print_rehearsal(document)
    raise typer.Exit(exit_code(document))
