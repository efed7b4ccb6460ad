"""`mpctl bench scaling`: the same job at several world sizes, and its efficiency."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli.bench.finish import finish
from mpctl.cli.bench.options import (
    AsJsonOption,
    DeviceOption,
    OutOption,
    OverwriteOption,
    bench_folder,
    command_text,
)
from mpctl.cli.options import JobSource, with_job

if TYPE_CHECKING:
    from mpctl.bench.scaling import Mode

DEFAULT_STEPS = 12

ModeOption = Annotated[
    Literal["strong", "weak", "both"],
    typer.Option(help="Keep the global batch (strong), or the samples of a rank (weak)."),
]
AlongOption = Annotated[
    Literal["job", "tp", "dp"],
    typer.Option(help="The axes that the ranks form: tp, dp, or the job's tp first and then dp."),
]


@with_job
def scaling(
    job: JobSource,
    world: Annotated[str, typer.Option(help="World sizes, such as 1,2,4.")] = "1,2",
    mode: ModeOption = "both",
    along: AlongOption = "job",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every case, in alternation.")] = 1,
    device: DeviceOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Train JOB at each world size; print tokens/s, speed-up and efficiency."""
    from mpctl.bench.budget import Budget
    from mpctl.bench.cases import RunCase, case_warnings, plan_cases
    from mpctl.bench.report import SCHEMA, bench_environment, load_warnings
    from mpctl.bench.runner import Watch, group_runs, run_cases
    from mpctl.bench.scaling import (
        ScalingReport,
        parse_worlds,
        scaling_cases,
        scaling_rows,
        timing_of,
    )
    from mpctl.launch.node.machine import this_machine
    from mpctl.render.bench import print_scaling
    from mpctl.render.errors import print_warnings
    from mpctl.render.tasks import TaskBar

    chosen: tuple[Mode, ...] = ("strong", "weak") if mode == "both" else (mode,)
    source = job.with_default("training.steps", DEFAULT_STEPS)
    if device is not None:
        source = source.with_default("launch.device", device)
    worlds, environment = parse_worlds(world), bench_environment()
    source = source.with_default(
        "launch.threads_per_rank", max(1, environment["cores"] // max(worlds))
    )
    base = source.plan().job
    cases = scaling_cases(base, worlds, along=along, modes=chosen)
    folder = bench_folder("scaling", out, overwrite=overwrite)
    to_run = [RunCase(case.name, partial(source.plan, case.settings)) for case in cases]
    planned = plan_cases(to_run, folder, this_machine(), overwrite=overwrite)
    print_warnings([*case_warnings(planned), *load_warnings(environment)])
    with TaskBar(lines=True) as bar:
        runs = group_runs(list(run_cases(
            planned, folder, command=command_text(), rounds=repeats, budget=Budget(),
            watch=Watch(bar.update),
        )))  # fmt: skip
    timings = [timing_of(case, runs[case.name]) for case in cases]
    report: ScalingReport = {
        "schema": SCHEMA,
        "bench": "scaling",
        "job": base.name,
        "is_complete": True,
        "environment": environment,
        "command": command_text(),
        "results": [row for m in chosen for row in scaling_rows(timings, m)],
        "findings": {"steps_timed": len(timings[0].step_seconds)},
    }
    finish(folder, report, print_scaling, as_json=as_json)
