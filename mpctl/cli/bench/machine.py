"""`mpctl bench machine`: measure this machine, and write the presets that plans are made on."""

from __future__ import annotations

from typing import Annotated

import typer

from mpctl.cli.bench.finish import finish
from mpctl.cli.bench.options import (
    AsJsonOption,
    BudgetOption,
    DeviceOption,
    OutOption,
    OverwriteOption,
    QuickOption,
    bench_folder,
    budget_seconds,
    command_text,
)
from mpctl.cli.options import JobSource, with_job

DEFAULT_JOB, DEFAULT_STEPS, QUICK_STEPS = "demo", 12, 6

NameOption = Annotated[
    str | None,
    typer.Option(help="Name of the presets; by default the host's.", show_default=False),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rounds of each stage, by default 3, with --quick 1.",
        show_default=False,
    ),
]


@with_job
def machine(
    job: JobSource,
    name: NameOption = None,
    rounds: RoundsOption = None,
    device: DeviceOption = None,
    quick: QuickOption = False,
    budget: BudgetOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Measure kernels, collectives and short training runs of this machine; write its presets.

    OUT/presets/devices/NAME.toml and OUT/presets/clusters/NAME.toml hold what was measured, when,
    where and with which versions. Plan on them with --cluster OUT/presets/clusters/NAME.toml, or by
    name with MPCTL_PRESETS=OUT/presets.

    Kernels and collectives give every figure; then the layouts of the job `demo` (or of JOB) in
    which each rank has a core (or GPU) are trained for --steps, and move a few figures within what
    the measurements allow: the host, memory, the link. The spread of the errors on layouts that
    were left out of that fit becomes the cluster's own, which sets the band of its plans. A machine
    with GPUs needs --cluster with a preset that has their data sheet.
    """
    import platform
    from functools import partial

    from mpctl.bench.budget import Budget
    from mpctl.bench.cases import case_warnings, plan_cases
    from mpctl.bench.machine import MachineBench
    from mpctl.bench.machine_plan import default_name, plan_machine
    from mpctl.bench.report import bench_environment, load_warnings
    from mpctl.bench.runner import Watch
    from mpctl.bench.verify_layouts import DEFAULT_SETTINGS
    from mpctl.launch.node.machine import this_machine
    from mpctl.render.bench_machine import print_machine
    from mpctl.render.errors import print_warnings
    from mpctl.render.tasks import TaskBar

    seconds, given = budget_seconds(budget, quick=quick), job.overrides
    if job.source is None:
        job = JobSource(DEFAULT_JOB, {**DEFAULT_SETTINGS, **job.overrides})
    source = job.with_default("training.steps", QUICK_STEPS if quick else DEFAULT_STEPS)
    if device is not None:
        source = source.with_default("launch.device", device)
    here, folder = this_machine(), bench_folder("machine", out, overwrite=overwrite)
    work = plan_machine(
        source.plan,
        here,
        name=name or default_name(platform.node()),
        given=given,
        rounds=rounds,
        quick=quick,
    )
    cases = plan_cases(work.cases(), folder, here, overwrite=overwrite)
    environment = bench_environment()
    print_warnings([*case_warnings(cases), *load_warnings(environment)])
    bench, stopped = MachineBench(work, environment, command_text()), None
    with TaskBar(lines=True) as bar:
        try:
            bench.run(folder, budget=Budget(seconds), watch=Watch(bar.update, bar.note, bar.print))
        except KeyboardInterrupt as error:
            stopped = error
    finish(folder, bench.report(), partial(print_machine, folder=folder), as_json=as_json)
    if stopped is not None:
        raise stopped
