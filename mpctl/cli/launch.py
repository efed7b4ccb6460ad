"""`mpctl launch`: run a job on exactly the layout that `mpctl plan` shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from mpctl.cli import complete
from mpctl.cli.options import JobSource, with_job
from mpctl.cli.status import OtherOwnerOption

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


RunDirOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory of the run; by default a new runs/NAME.", autocompletion=complete.run
    ),
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
        "device's memory. Exit code 3: a rank leaves less than the headroom of it.",
    ),
]
RankOption = Annotated[
    int | None,
    typer.Option(help="With --rehearse: simulate this rank instead.", show_default=False),
]
AuditOption = Annotated[
    bool,
    typer.Option(
        "--audit",
        help="With --rehearse: also count the kernels that each module launches and the bytes that "
        "they move on a GPU, beside the least possible; no GPU is needed.",
    ),
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
ProfileOption = Annotated[
    str | None,
    typer.Option(
        metavar="STEPS",
        show_default=False,
        help="Record in these steps, such as 5-7, what every rank does when, for `mpctl bench "
        "trace`. The first two steps are slower than others.",
    ),
]
OnOption = Annotated[
    Literal["auto", "local", "slurm", "ssh", "kubernetes", "torchrun"] | None,
    typer.Option(
        help="Where ranks are started: on this host, on hosts of an allocation or a hostfile, in a "
        "world that another program started.",
        show_default=False,
    ),
]
SubmitOption = Annotated[
    bool, typer.Option("--submit", help="Hand the run to the scheduler and return at once.")
]
HostfileOption = Annotated[
    Path | None,
    typer.Option(
        help="Use ssh (--on ssh) and the hosts of this file, a line `HOST slots=N` each.",
        show_default=False,
    ),
]
IncludeOption = Annotated[
    str | None,
    typer.Option(help="Of the hostfile, use only these hosts: n1@n2:0,1.", show_default=False),
]
ExcludeOption = Annotated[
    str | None,
    typer.Option(help="Of the hostfile, leave these hosts out: n1@n2:0,1.", show_default=False),
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
    allow_other_owner: OtherOwnerOption = False,
) -> None:
    """Train JOB: prepare the data, start the ranks, watch them, leave no process behind."""
    if rehearse or audit or rank is not None:
        from mpctl.cli.rehearse import require_alone, run_rehearsal

        flags = {"--run-dir": run_dir, "--dry-run": dry_run, "--resume": resume,
                 "--overwrite": overwrite, "--tensorboard": tensorboard, "--csv": csv,
                 "--profile": profile, "--on": on, "--submit": submit,
                 "--hostfile": hostfile}  # fmt: skip
        own = "--audit" if audit else "--rank"
        require_alone(rehearse, own, [name for name, value in flags.items() if value])
        run_rehearsal(job, device, rank, audits=audit, as_json=as_json)
    from mpctl.cli.launch_joined import dismiss_followers, follow_if_joined

    follow_if_joined(
        job, run_dir, on, resume=resume, is_dry=dry_run or submit, is_trusted=allow_other_owner
    )
    from mpctl.cli.launch_run import Launch
    from mpctl.cli.launch_source import require_same_model, resolve, say_finished
    from mpctl.launch.resume import find_resumption
    from mpctl.runs.submitted import refusal_recorded

    with refusal_recorded(run_dir if resume else None, os.environ):
        settings = {"launch.tensorboard": tensorboard, "launch.csv": csv, "launch.profile": profile,
                    "launch.on": on}  # fmt: skip
        job = job.with_settings({**settings, **ssh_settings(on, hostfile, include, exclude)})
        plan, run = resolve(job, run_dir, device, resume=resume, overwrite=overwrite)
        resumption = find_resumption(run) if resume else None
        if resumption and resumption.folder and resumption.step >= plan.job.training.steps:
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
    """The settings of the options about hosts; a hostfile alone means --on ssh."""
    if hostfile is None:
        return {"launch.ssh.include": include, "launch.ssh.exclude": exclude}
    return {
        "launch.on": on or "ssh",
        "launch.ssh.hostfile": str(hostfile),
        "launch.ssh.include": include,
        "launch.ssh.exclude": exclude,
    }
