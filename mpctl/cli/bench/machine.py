"""`mpctl bench machine`: measure this machine, and write presets for plans on it."""

from __future__ import annotations

from typing import Annotated

import typer

from mpctl.cli.bench.common import BenchCommand, with_bench
from mpctl.cli.options import JobSource, with_job

DEFAULT_JOB, DEFAULT_STEPS, QUICK_STEPS = "demo", 8, 6
SECONDS = 300.0

NameOption = Annotated[str | None, typer.Option(help="Name of the presets; by default the host's.", show_default=False)]
RoundsOption = Annotated[
    int | None, typer.Option(min=1, help="Most rounds of all stages; by default 3, with --quick 1.", show_default=False)
]


@with_job
@with_bench("machine")
def machine(job: JobSource, bench: BenchCommand, name: NameOption = None, rounds: RoundsOption = None) -> None:
    """Measure kernels, collectives and short training runs of this machine; write its presets.

    OUT/presets/clusters/NAME.toml and devices/NAME.toml have the results. Plan on them with --cluster FILE, or
    by name with MPCTL_PRESETS=OUT/presets.

    Kernels and collectives determine every figure. Then short runs of `demo` (or JOB), in layouts with a core
    or GPU for each rank, adjust host, memory and link a little; errors of layouts left out of the fit become
    the band of its plans. Rounds take five minutes at most (--budget). A machine with GPUs needs --cluster
    with a preset that has their data sheet.
    """
    import platform

    from mpctl.measure.bench.cases import case_warnings, plan_cases
    from mpctl.measure.bench.layouts import DEFAULT_SETTINGS
    from mpctl.measure.bench.machine import MachineBench
    from mpctl.measure.bench.machine_plan import default_name, plan_machine
    from mpctl.measure.bench.runner import Budget, Watch
    from mpctl.render.progress import TaskBar
    from mpctl.run.hosts.machine import this_machine

    given = job.overrides
    if job.source is None:
        job = JobSource(DEFAULT_JOB, {**DEFAULT_SETTINGS, **job.overrides})
    source = bench.job(job, steps=DEFAULT_STEPS, quick_steps=QUICK_STEPS)
    here, folder = this_machine(), bench.folder
    work = plan_machine(
        source.plan, here, name=name or default_name(platform.node()), given=given, rounds=rounds, quick=bench.quick
    )
    cases = plan_cases(work.cases(), folder, here, overwrite=bench.overwrite)
    bench.warn(case_warnings(cases))
    measured, is_stopped = MachineBench(work, bench.environment, bench.command), False
    with TaskBar(lines=True) as bar:
        try:
            watch = Watch(bar.update, bar.note, bar.print)
            measured.run(folder, budget=Budget(bench.seconds or SECONDS), watch=watch)
        except KeyboardInterrupt:
            is_stopped = True
    bench.finish(measured.report(), is_stopped=is_stopped)
