"""`mpctl bench report`, `compare` and `trace`: draw and compare earlier measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli.bench.common import OverwriteOption, command_text, draw
from mpctl.cli.options import AsJsonOption, RunArgument

if TYPE_CHECKING:
    from mpctl.measure.bench.trace import PlannedStep
    from mpctl.spec.job import JobSpec


ReportArgument = typer.Argument(help="A report.json of mpctl bench, or the folder that holds it.")
FolderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for a copy of the report with its page and pictures; by default the folder of the report.",
        show_default=False,
    ),
]


def report(
    source: Annotated[Path, ReportArgument], out: FolderOption = None, overwrite: OverwriteOption = False
) -> None:
    """Draw the page, the pictures and the CSV of a report again.

    For reports from other machines. Exit code 2 for a file that is no
    report, or a folder that cannot be written or has foreign files.
    """
    from mpctl.core.errors import InputError
    from mpctl.measure.bench.documents import read_report, report_path
    from mpctl.measure.bench.report import REPORT, TABLE, check_redrawn, save_report
    from mpctl.render.bench import report_warnings
    from mpctl.render.output import print_warnings

    found = read_report(source, "SOURCE", complete=True)
    folder = report_path(source).parent if out is None else out
    if issues := list(check_redrawn(folder, is_own=out is None, overwrite=overwrite)):
        raise InputError(issues)
    save_report(folder, found)
    print_warnings(list(report_warnings(found)))
    draw(folder, found, [REPORT, TABLE], as_json=False)


ThresholdOption = Annotated[float, typer.Option(min=0, metavar="PERCENT", help="How much slower a row may be.")]


def compare(
    a: Annotated[Path, ReportArgument],
    b: Annotated[Path, ReportArgument],
    threshold: ThresholdOption = 10.0,
    as_json: AsJsonOption = False,
) -> None:
    """Compare report B with the older report A; exit code 1 if a row became slower.

    Rows are matched by name. A row is slower if its median grew by more than --threshold percent
    and every round of B took longer than every round of A. Warns if machine, versions or command
    differ. Exit code 2 for files that are not reports of the same bench.
    """
    from contextlib import suppress
    from math import isfinite

    from mpctl.core.errors import InputError
    from mpctl.measure.bench.compare import compare_reports
    from mpctl.measure.bench.documents import read_reports
    from mpctl.render.bench import print_bench_comparison
    from mpctl.render.output import print_json

    if not isfinite(threshold):
        raise InputError.of(
            "bad-threshold", "--threshold", f"{threshold} is no number of percent", "for example --threshold 10"
        )
    before, after = read_reports({"A": a, "B": b})
    comparison = compare_reports(before, after, threshold)
    with suppress(BrokenPipeError):  # `| head` does not change the exit code
        if as_json:
            print_json(comparison)
        else:
            print_bench_comparison(comparison)
    if comparison["regressions"]:
        raise typer.Exit(1)


def trace(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option(help="File of the trace; by default RUN/profile/trace.json.")] = None,
    as_json: AsJsonOption = False,
) -> None:
    """Write a trace of every rank of RUN in its profiled steps, together with the planned step.

    RUN must have been launched with --profile STEPS. Open the file in ui.perfetto.dev or
    chrome://tracing: it has a process for each rank with passes, collectives and messages, and one
    for each stage of the plan, which starts with each step. Clocks of several hosts are aligned by
    the all-reduce that ends each step. Also prints where the time of a step goes.
    """
    from mpctl.core.errors import InputError, Issue
    from mpctl.core.units import plural
    from mpctl.measure.bench.trace import read_run_profile, trace_report
    from mpctl.render.bench import print_report
    from mpctl.render.markup import write_text
    from mpctl.render.output import print_json
    from mpctl.render.run_trace import run_trace_text
    from mpctl.run.history.saved import read_job, require_run, short_name

    folder = require_run(run)
    job, profile = read_job(folder / "job.json"), read_run_profile(folder)
    if isinstance(job, str):
        raise InputError([Issue("no-job", str(folder), job, "use a run whose job.json is intact")])
    planned, path = planned_step(job), out or folder / "profile" / "trace.json"
    name = job.name or short_name(run)
    write_text(path, run_trace_text(profile, planned, job=name), option="--out")
    report = trace_report(profile, planned, job=name, command=command_text(), file=str(path))
    if as_json:
        print_json(report)
    else:
        unread = f"{plural(profile.foreign, 'line')} of the profile could not be read"
        print_report(report, path.parent, more=[unread] if profile.foreign else [])


def planned_step(job: JobSpec) -> PlannedStep:
    """The step of the job's plan; without times if the job's cluster allows no estimate."""
    from mpctl.plan.estimate.timeline import find_step_line
    from mpctl.plan.planning.plan import make_plan
    from mpctl.run.launch.summary import plan_as_launched

    estimate = plan_as_launched(make_plan(job)).estimate
    if estimate is None:
        return {"line": None, "seconds": None, "contention": 0.0}
    line = find_step_line(estimate.layout)
    return {
        "line": None if isinstance(line, str) else line,
        "seconds": estimate.step_seconds,
        "contention": estimate.contention,
    }
