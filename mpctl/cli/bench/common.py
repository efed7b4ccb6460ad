"""Code that benches share: their options, the folder of their report, how they end, their hosts.

The fields of `BenchCommand` are options: `with_bench("kernels")` adds each of them to a command,
which receives one value instead. The folder and the machine are looked up at first use, so that a
job that cannot be benched is refused before its folder is.

In a world that another program started (torchrun, srun, mpirun, Kubeflow) every process runs the
command, and those after the first follow it. That is possible for a bench of one launch; a bench of
several layouts needs worlds of several sizes, and is refused there.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from mpctl.cli.launch import ExcludeOption, HostfileOption, IncludeOption, ssh_settings
from mpctl.cli.options import AsJsonOption, Command, JobSource, with_value
from mpctl.core.errors import InputError

if TYPE_CHECKING:
    from mpctl.measure.bench.probe import RankBench
    from mpctl.measure.bench.report import BenchEnvironment, BenchReport

QUICK_SECONDS = 45.0
RANKS = "ranks-r1"
"""The run directory of a bench of one launch, in the bench's folder."""

DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where ranks run; by default as the job says.", show_default=False),
]
OutOption = Annotated[Path | None, typer.Option(help="Folder of the report; by default a new runs/bench-NAME.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the bench in --out.")]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Measure less, in under a minute; results are less precise.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Start no round that would end later than this after the start of the first.",
        show_default=False,
    ),
]
BenchOnOption = Annotated[
    Literal["auto", "local", "slurm", "ssh", "torchrun"] | None,
    typer.Option(
        help="Where ranks are started: on this host, on the hosts of an allocation or hostfile, "
        "or in a world that another program started; by default as for `mpctl launch`.",
        show_default=False,
    ),
]
LAYOUT_WORD = re.compile(r"\w+=")
LayoutsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="AXIS=SIZES...",
        help="Every combination of these sizes of tp, cp, pp, dp, vpp and zero: tp=1,2 pp=1,2.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class BenchCommand:
    """The options that all benches share, and what follows from them. name: the subcommand.

    Raises InputError for a budget of 0 s or less.
    """

    name: str
    device: DeviceOption = None
    out: OutOption = None
    overwrite: OverwriteOption = False
    quick: QuickOption = False
    budget: BudgetOption = None
    as_json: AsJsonOption = False

    def __post_init__(self) -> None:
        if self.budget is not None and not self.budget > 0:
            message = f"{self.budget:g} s is no time to measure in"
            hint = "give seconds above 0, such as --budget 60"
            raise InputError.of("bad-budget", "--budget", message, hint)

    @property
    def seconds(self) -> float | None:
        """Seconds that the rounds may take, None without a limit."""
        return self.budget or (QUICK_SECONDS if self.quick else None)

    @cached_property
    def folder(self) -> Path:
        """The folder of the report: --out, or a new runs/bench-NAME. Raises InputError where it is
        occupied and may not be replaced."""
        from mpctl.measure.bench.report import check_folder
        from mpctl.records.rundir.directory import free_run_dir

        name = f"bench-{self.name}"
        if self.out is None:
            return Path("runs") / name if self.overwrite else free_run_dir(name).path
        if issues := list(check_folder(self.out, overwrite=self.overwrite)):
            raise InputError(issues)
        return self.out

    @property
    def command(self) -> str:
        """The command line as typed, for reports."""
        return command_text()

    @cached_property
    def environment(self) -> BenchEnvironment:
        """This machine, recorded at first use, before anything is measured."""
        from mpctl.measure.bench.report import bench_environment

        return bench_environment()

    def job(self, job: JobSource, *, steps: int, quick_steps: int) -> JobSource:
        """The job to be trained: this many steps, on --device, unless the command line sets them.
        quick_steps: steps with --quick."""
        job = job.with_default("training.steps", quick_steps if self.quick else steps)
        return job if self.device is None else job.with_default("launch.device", self.device)

    def warn(self, warnings: Iterable[str]) -> None:
        """Print these warnings, and one where other programs use the cores."""
        from mpctl.measure.bench.report import load_warnings
        from mpctl.render.output import print_warnings

        print_warnings([*warnings, *load_warnings(self.environment)])

    def measure(self, ranks: RankBench, warnings: Iterable[str] = ()) -> None:
        """Let the ranks of a bench measure. The bench's folder is replaced, and has the results
        from the first round on. warnings: printed before."""
        from mpctl.cli.signals import ended_by_signals
        from mpctl.measure.bench.report import save_report, take_folder
        from mpctl.measure.bench.runner import Watch
        from mpctl.records.rundir.directory import RunDir
        from mpctl.render.progress import TaskBar

        folder = self.folder  # may refuse, before any warning is printed
        self.warn(warnings)
        take_folder(folder)
        with ended_by_signals(f"{folder} has what was measured"), TaskBar(lines=not self.as_json) as bar:
            ranks.measure(
                RunDir(folder / RANKS),
                Watch(bar.update, on_event=bar.print),
                on_round=lambda: save_report(folder, ranks.report()),
            )

    def finish(self, report: BenchReport, *, is_stopped: bool = False) -> None:
        """Write the bench's folder and show its report: as tables, or as JSON on stdout.

        The report is written first, so that a later error loses no measurement, and the pictures
        last. Raises KeyboardInterrupt at the end if Ctrl-C ended the bench (is_stopped), and
        InputError where the folder cannot be written.
        """
        from mpctl.measure.bench.report import REPORT, TABLE, save_report
        from mpctl.render.output import print_json

        save_report(self.folder, report)
        if self.as_json:
            print_json(report)
        else:
            from mpctl.render.bench import print_report

            print_report(report, self.folder)
        draw(self.folder, report, [REPORT, TABLE], as_json=self.as_json)
        if is_stopped:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class HostsBench(BenchCommand):
    """The same for a bench whose ranks may run on other hosts, named as for `mpctl launch`."""

    on: BenchOnOption = None
    hostfile: HostfileOption = None
    include: IncludeOption = None
    exclude: ExcludeOption = None

    def on_hosts(self, job: JobSource) -> JobSource:
        """The job on these hosts. Raises InputError in the first process of a joined world; the
        others end."""
        from mpctl.run.clusters.torchrun.world import find_world
        from mpctl.spec.load import load_job

        job = self._on_hosts(job)
        on, world = job.overrides.get("launch.on"), find_world(os.environ)
        if on is None and world is not None:
            on = load_job(job.source, _about_launch(job)).launch.on
        if on not in (None, "auto", "torchrun") or (world is None and on != "torchrun"):
            return job
        if world is not None and not world.is_first:
            raise typer.Exit(2)
        why = "this bench launches layouts of several sizes, and a world that is started already has one"
        hint = "use --on slurm in the allocation, or --on ssh with a hostfile; --on local for this "
        raise InputError.of("bench-in-world", "--on", why, f"{hint}host")

    def joined(self, job: JobSource, *, is_dry: bool = False) -> JobSource:
        """The job of a bench of one launch, in OUT/RANKS, on these hosts. In a joined world this
        returns in the first process only; the others follow it."""
        from mpctl.cli.launch_run import follow_if_joined

        job = self._on_hosts(job)
        run_dir = None if self.out is None else self.out / RANKS
        about = JobSource(job.source, _about_launch(job))
        on = job.overrides.get("launch.on")
        follow_if_joined(about, run_dir, on, resume=False, is_dry=is_dry, named_by="--out")
        return job

    def _on_hosts(self, job: JobSource) -> JobSource:
        ssh = ssh_settings(self.on, self.hostfile, self.include, self.exclude)
        return job.with_settings({"launch.on": self.on, **ssh})


def _about_launch(job: JobSource) -> dict[str, Any]:
    """The settings of [launch] on the command line, without options that only benches have, such as
    several data types."""
    from mpctl.spec.names import full_name

    return {k: v for k, v in job.overrides.items() if full_name(k).startswith("launch.")}


def with_bench(name: str, kind: type[BenchCommand] = BenchCommand) -> Callable[[Command], Command]:
    """Add the options of a kind of `BenchCommand` to a command, which receives it as `bench`.
    name: the subcommand."""
    hints = get_type_hints(kind, include_extras=True)
    options = [
        option.replace(annotation=hints[option.name])
        for option in signature(kind).parameters.values()
        if option.name != "name"
    ]
    return with_value("bench", options, partial(kind, name))


def command_text() -> str:
    """The command line of this process, for reports."""
    return shlex.join(["mpctl", *sys.argv[1:]])


def draw(folder: Path, report: BenchReport, written: list[str], *, as_json: bool) -> None:
    """Write the page and the pictures of a report, and print the names of all files, those in
    `written` first: on stdout, or on stderr where stdout is for JSON."""
    from mpctl.render.bench import write_bench_files
    from mpctl.render.console import say

    names = [*written, *(path.name for path in write_bench_files(folder, report))]
    say(f"wrote {', '.join(names)} in {folder}", stderr=as_json)


def with_layout_words(
    job: JobSource, layouts: list[str] | None, words: list[str]
) -> tuple[JobSource, list[str] | None]:
    """The job, and all words of --layouts tp=1,2 pp=1,2; None without that option. The parser
    passes the words after the first as it does JOB; their `=` distinguishes them.

    words: arguments after the first, which is job.source. Raises InputError for several jobs with
    --layouts, which takes one.
    """
    free = [*([job.source] if job.source else []), *words]
    named = [word for word in free if LAYOUT_WORD.match(word)] if layouts else []
    jobs = [word for word in free if word not in named]
    if len(jobs) > 1:
        message, hint = f"unexpected {jobs[1]!r} after {jobs[0]!r}", "give one JOB"
        raise InputError.of("usage", "JOB", message, hint)
    every = [*layouts, *named] if layouts else None
    return job._replace(source=jobs[0] if jobs else None), every
