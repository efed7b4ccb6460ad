"""`mpctl doctor`: what every host offers, and what would break a launch there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mpctl.cli.launch import (
    ExcludeOption,
    HostfileOption,
    IncludeOption,
    OnOption,
    ssh_settings,
)
from mpctl.cli.options import JobSource, with_job

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
    on: OnOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
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
    from mpctl.cli.doctor_run import question_of
    from mpctl.doctor.redact import redact as redacted

    settings = {"launch.on": on, "launch.device": device}
    job = job.with_settings({**settings, **ssh_settings(on, hostfile, include, exclude)})
    diagnosis = question_of(job, run_dir, collectives=collectives).answer()
    shown = redacted(diagnosis) if redact else diagnosis
    if as_json:
        from mpctl.render.output import print_json

        print_json(shown.model_dump(by_alias=True))
    elif markdown:
        from mpctl.render.doctor import print_markdown

        print_markdown(shown)
    else:
        from mpctl.render.doctor import print_diagnosis

        print_diagnosis(shown)
    raise typer.Exit(1 if diagnosis.has_errors else 0)
