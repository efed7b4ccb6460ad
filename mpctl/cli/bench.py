"""`mpctl bench`: measure scaling efficiency, and tensor modes, on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli.hints import HintingGroup
from mpctl.cli.options import JobSource, with_job

if TYPE_CHECKING:
    from mpctl.bench.scaling import Mode

app = typer.Typer(
    cls=HintingGroup, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True
)
DEFAULT_STEPS = 12
DEFAULT_PASSES = 5


@app.callback()
def bench() -> None:
    """Measure on this machine: scaling efficiency by training runs, tensor modes by one layer."""


ModeOption = Annotated[
    Literal["strong", "weak", "both"],
    typer.Option(help="Keep the global batch (strong), or the samples of a rank (weak)."),
]
AlongOption = Annotated[
    Literal["job", "tp", "dp"],
    typer.Option(help="The axes that the ranks form: tp, dp, or the job's tp first and then dp."),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where ranks run; by default as the job says.", show_default=False),
]
OutOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the runs and the report; a new runs/bench-scaling by default."),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the bench in --out.")]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")]


@app.command()
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
    from mpctl.bench.report import ScalingReport, bench_environment, load_warnings, write_report
    from mpctl.bench.runner import plan_cases, run_cases
    from mpctl.bench.scaling import parse_worlds, scaling_cases, scaling_rows
    from mpctl.render.bench import print_scaling, run_view
    from mpctl.render.errors import print_warnings
    from mpctl.render.json import print_json
    from mpctl.render.tasks import TaskBar
    from mpctl.rundir.directory import free_run_dir

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
    if out is None:
        out = Path("runs/bench-scaling") if overwrite else free_run_dir("bench-scaling").path
    launches = plan_cases(source.plan, cases, out, overwrite=overwrite)
    launch_warnings = dict.fromkeys(w for launch in launches for w in launch.warnings)
    print_warnings([*launch_warnings, *load_warnings(environment)])
    with TaskBar() as bar:
        timings = run_cases(
            cases, launches, out=out, repeats=repeats, open_view=run_view, on_progress=bar.update
        )
    report: ScalingReport = {
        "schema": "mpctl.bench.scaling/1",
        "job": base.name,
        "results": [row for m in chosen for row in scaling_rows(timings, m)],
        "steps_timed": len(timings[0].step_seconds),
        "environment": environment,
        "command": shlex.join(["mpctl", *sys.argv[1:]]),
    }
    write_report(out, report)
    if as_json:
        print_json(report)
    else:
        print_scaling(report)


RanksOption = Annotated[
    int, typer.Option(min=1, help="Ranks that share the layer: 4 are a square, 8 a cube.")
]
RoundsOption = Annotated[int, typer.Option(min=1, help="Rounds of all modes, in alternation.")]


@app.command("tensor-modes")
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
    command = shlex.join(["mpctl", *sys.argv[1:]])
    report = bench_report(cases, measured, steps=steps, machine=machine, command=command)
    if as_json:
        print_json(report)
    else:
        print_report(report)
    if not measured.is_complete:
        raise KeyboardInterrupt
