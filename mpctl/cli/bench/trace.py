"""`mpctl bench trace`: profiled steps of a run as a trace, with the planned step beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli.bench.options import AsJsonOption, command_text
from mpctl.cli.status import RunArgument

if TYPE_CHECKING:
    from mpctl.bench.trace import PlannedStep
    from mpctl.spec.job import JobSpec


def trace(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(help="File of the trace; by default RUN/profile/trace.json."),
    ] = None,
    as_json: AsJsonOption = False,
) -> None:
    """Write what every rank of RUN did when in its profiled steps as a trace, beside the plan.

    RUN was launched with --profile STEPS. Open the file in ui.perfetto.dev or chrome://tracing: a
    process for each rank with its passes, its collectives and its messages, and one for each
    stage of the plan, which begins with each step. Clocks of several hosts are aligned by the
    all-reduce that ends each step. Also prints where the time of a step goes.
    """
    from mpctl.bench.trace import read_run_profile, trace_report
    from mpctl.errors import InputError, Issue
    from mpctl.render.bench_trace import print_trace
    from mpctl.render.markup import write_text
    from mpctl.render.output import print_json
    from mpctl.render.run_trace import run_trace_text
    from mpctl.runs.saved import read_job, require_run, short_name

    folder = require_run(run)
    job, profile = read_job(folder / "job.json"), read_run_profile(folder)
    if isinstance(job, str):
        raise InputError([Issue("no-job", str(folder), job, "use a run whose job.json is whole")])
    planned, path = planned_step(job), out or folder / "profile" / "trace.json"
    name = job.name or short_name(run)
    write_text(path, run_trace_text(profile, planned, job=name), option="--out")
    report = trace_report(profile, planned, job=name, command=command_text(), file=str(path))
    if as_json:
        print_json(report)
    else:
        print_trace(report, foreign=profile.foreign)


def planned_step(job: JobSpec) -> PlannedStep:
    """The step of the job's plan; without times where the job's cluster gives none."""
    from mpctl.estimate.timeline import find_step_line
    from mpctl.launch.summary import plan_as_launched
    from mpctl.planning.plan import make_plan

    estimate = plan_as_launched(make_plan(job)).estimate
    if estimate is None:
        return {"line": None, "seconds": None, "contention": 0.0}
    line = find_step_line(estimate.layout)
    return {
        "line": None if isinstance(line, str) else line,
        "seconds": estimate.step_seconds,
        "contention": estimate.contention,
    }
