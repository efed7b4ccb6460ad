"""`mpctl doctor`: what every host offers, and what would break a launch there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli.options import JobSource, with_job

if TYPE_CHECKING:
    from mpctl.doctor.diagnosis import Diagnosis, Finding
    from mpctl.doctor.needs import Needs
    from mpctl.planning.plan import Plan

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

RunDirOption = Annotated[
    Path,
    typer.Option(help="Directory of the runs: whether ranks can write there, and how fast."),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where ranks would run; by default as the job says.", show_default=False),
]
CollectivesOption = Annotated[
    bool,
    typer.Option("--collectives", help="Also time all-reduces of torch, by gloo or NCCL."),
]
RedactOption = Annotated[
    bool,
    typer.Option("--redact", help="Replace names of hosts and users, addresses, home folders."),
]
MarkdownOption = Annotated[
    bool, typer.Option("--markdown", help="Print Markdown to paste into a bug report.")
]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.command()
@with_job
def doctor(
    job: JobSource,
    run_dir: RunDirOption = Path("runs"),
    device: DeviceOption = None,
    collectives: CollectivesOption = False,
    redact: RedactOption = False,
    markdown: MarkdownOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Look at every host: software, devices, memory, limits, network, run directory, speed of
    links.

    With JOB also whether its launch would start. Exit code 1 when something would break a launch;
    every finding comes with a way out. Nothing is left behind on any host.
    """
    from mpctl.doctor.redact import redact as redacted

    diagnosis = _diagnose(job, run_dir, device, collectives=collectives)
    shown = redacted(diagnosis) if redact else diagnosis
    if as_json:
        from mpctl.render.json import print_json

        print_json(shown.model_dump(by_alias=True))
    elif markdown:
        from mpctl.render.doctor_markdown import print_markdown

        print_markdown(shown)
    else:
        from mpctl.render.doctor import print_diagnosis

        print_diagnosis(shown)
    raise typer.Exit(1 if diagnosis.has_errors else 0)


def _diagnose(job: JobSource, run_dir: Path, device: str | None, *, collectives: bool) -> Diagnosis:
    """Look at this host, with a bar meanwhile, and add what a launch of the job would be refused
    for."""
    import socket

    from mpctl.doctor.examine import Examination, examine
    from mpctl.doctor.hosts import LocalHosts
    from mpctl.doctor.needs import Needs
    from mpctl.render.tasks import TaskBar

    plan = _plan(job, device)
    needs = Needs() if plan is None else _needs(plan)
    name = None if plan is None else plan.job.name or job.source or "this job"
    wanted = Examination("local", run_dir, needs, name, collectives)
    with TaskBar() as bar:
        diagnosis = examine(LocalHosts([socket.gethostname()]), wanted, bar.update)
    refusals = [] if plan is None else _refusals(plan, run_dir)
    known = {finding.rule for finding in diagnosis.findings}
    new = [finding for finding in refusals if finding.rule not in known]
    return diagnosis.model_copy(update={"findings": [*new, *diagnosis.findings]})


def _plan(job: JobSource, device: str | None) -> Plan | None:
    """The plan of the job; None where neither a job nor a setting is named."""
    if job.source is None and not job.overrides:
        return None
    return job.plan({} if device is None else {"launch.device": device})


def _needs(plan: Plan) -> Needs:
    from mpctl.doctor.needs import needs_of
    from mpctl.launch.node.machine import this_machine
    from mpctl.launch.preflight import chosen_device

    return needs_of(plan, chosen_device(plan.job, this_machine()), one_host=True)


def _refusals(plan: Plan, run_dir: Path) -> list[Finding]:
    """Why `mpctl launch` would refuse the plan on this host, as findings."""
    from mpctl.doctor.diagnosis import Finding
    from mpctl.launch.node.machine import this_machine
    from mpctl.launch.preflight import check_launch
    from mpctl.rundir.directory import RunDir

    issues = check_launch(plan, this_machine(), RunDir(run_dir / "doctor"))
    return [
        Finding(
            status="error",
            rule=issue.rule,
            where=issue.where,
            hosts=[],
            message=issue.message,
            hint=issue.hint,
        )
        for issue in issues
    ]
