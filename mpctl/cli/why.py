"""`mpctl why`: why a run takes as long as it does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli.options import AsJsonOption, JobSource, with_job
from mpctl.core.errors import InputError

if TYPE_CHECKING:
    from mpctl.interop.log_rows import LogLayout
    from mpctl.measure.why.observed import Observed

LogArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="LOG",
        help="The log of another launcher, whose lines of steps are read. Without it, JOB is a run directory "
        "of mpctl, or a log that prints its settings.",
        show_default=False,
    ),
]
LauncherOption = Annotated[
    str | None, typer.Option(help="Whose lines the log has; by default found in it.", show_default=False)
]
HtmlOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the answer as an HTML page.")]
FullOption = Annotated[bool, typer.Option("--full", help="Show every suspect, check, change and note.")]
JOB_ENDINGS = (".toml", ".json")


@with_job(takes_words=True)
def why(
    job: JobSource,
    log: LogArgument = None,
    launcher: LauncherOption = None,
    html: HtmlOption = None,
    full: FullOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Say why a run takes as long as it does: its log, or a run directory, against its plan.

    mpctl why train.sh slurm.log reads the job from a launch script; JOB may also be a job file. The
    answer: whether the run is inside the plan's band, the step by cause, suspects with what to check,
    and what to change.

    Exit codes: 0 answered, inside the band or not; 2 bad input, or a log that is not of this job.
    """
    from mpctl.measure.why.document import why_document
    from mpctl.render.output import print_json
    from mpctl.render.progress import PATIENCE, TaskBar

    observed = _observe(job, log, launcher)
    with TaskBar(after=PATIENCE) as bar:
        document = why_document(observed, bar.update)
    if html is not None:
        from mpctl.render.why import write_why_page

        options = [*job.with_words([log] if log else []), *(["--launcher", launcher] if launcher else [])]
        line = f"{job.line('why')} {shlex.join([*options, '--html', str(html)])}"
        write_why_page(html, document, observed.points, command=line)
    if as_json:
        print_json(document)
        return
    from mpctl.render.why import print_why

    print_why(document, full=full)


def _observe(job: JobSource, log: str | None, launcher: str | None) -> Observed:
    """Read the log or the run directory that the words name."""
    from mpctl.interop.log_rows import LogLayout
    from mpctl.measure.why.observed import observe_log, observe_run

    settings = dict(job.own)
    layout = LogLayout(settings=settings, cluster=settings.pop("cluster", None), launcher=launcher)
    if job.read is not None:
        logs = job.with_words([log] if log else [])
        if len(logs) != 1:
            raise InputError.of("usage", "LOG", f"{len(logs)} logs are named with --from", "name one")
        return observe_log(Path(logs[0]), layout._replace(flags=job.read))
    if job.source is None:
        raise InputError.of("usage", "LOG", "no log is named", "mpctl why train.sh LOG, or mpctl why RUN")
    if log is not None:
        return observe_log(Path(log), _with_job(layout, job.source))
    if Path(job.source).is_file():
        return observe_log(Path(job.source), layout)
    return observe_run(Path(job.source))


def _with_job(layout: LogLayout, source: str) -> LogLayout:
    """The layout of a job file, a job preset or a launch script."""
    path = Path(source)
    if path.is_file() and path.suffix not in JOB_ENDINGS:
        return layout._replace(flags=("", f"@{source}"))
    return layout._replace(job=source)
