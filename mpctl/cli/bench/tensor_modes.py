"""`mpctl bench tensor-modes`: one layer in every mode of tensor parallelism, beside its plan."""

from __future__ import annotations

from typing import Annotated

import typer

from mpctl.cli.bench.options import AsJsonOption, DeviceOption, command_text
from mpctl.cli.options import JobSource, with_job

DEFAULT_PASSES = 5


RanksOption = Annotated[
    int, typer.Option(min=1, help="Ranks that share the layer: 4 are a square, 8 a cube.")
]
RoundsOption = Annotated[int, typer.Option(min=1, help="Rounds of all modes, in alternation.")]


@with_job
def tensor_modes(
    job: JobSource,
    ranks: RanksOption = 4,
    rounds: RoundsOption = 5,
    device: DeviceOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say which modes would be timed, and time none.")
    ] = False,
    as_json: AsJsonOption = False,
) -> None:
    """Run one layer of JOB's model in every tensor mode that the ranks allow, beside its plan.

    Prints time, bytes sent, parameters and saved activations of a rank. A mode takes --steps
    forwards and backwards in each round, by default 5. Without JOB the layer is of the preset
    demo-gpt. Ctrl-C prints what was measured until then.
    """
    from mpctl.bench.tensor_modes import (
        DEFAULT_JOB,
        bench_report,
        layer_job,
        measure,
        mode_cases,
    )
    from mpctl.launch.node.machine import this_machine
    from mpctl.render.bench_modes import print_cases, print_report
    from mpctl.render.json import print_json
    from mpctl.render.tasks import TaskBar

    settings = {**({} if job.source else DEFAULT_JOB), **job.overrides}
    steps = settings.pop("training.steps", DEFAULT_PASSES)
    loaded = layer_job(job.source, settings)
    machine, where = this_machine(), device or loaded.launch.device
    cases = mode_cases(loaded, ranks, machine, device=where)
    if dry_run:
        print_cases(cases, rounds=rounds, steps=steps)
        return
    with TaskBar(lines=not as_json) as bar:
        measured = measure(cases, rounds=rounds, steps=steps, on_progress=bar.update)
    report = bench_report(cases, measured, steps=steps, machine=machine, command=command_text())
    if as_json:
        print_json(report)
    else:
        print_report(report)
    if not measured.is_complete:
        raise KeyboardInterrupt
