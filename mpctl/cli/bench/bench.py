"""What every bench that measures has in common: its options, its folder, and how it ends.

The fields of `BenchCommand` are options: `with_bench("kernels")` adds each of them to a command,
which receives one value instead. The folder and the machine are looked up when they are first asked
for, so that a job that cannot be benched is refused before its folder is.

By hand, `mpctl bench kernels --quick` has 45 seconds and the folder runs/bench-kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from mpctl.cli.bench.options import (
    AsJsonOption,
    BudgetOption,
    DeviceOption,
    OutOption,
    OverwriteOption,
    QuickOption,
    command_text,
)
from mpctl.errors import InputError

if TYPE_CHECKING:
    from mpctl.bench.report import BenchEnvironment, BenchReport
    from mpctl.cli.options import JobSource

QUICK_SECONDS = 45.0
Command = Callable[..., None]
Report = TypeVar("Report", bound="BenchReport")


@dataclass(frozen=True)
class BenchCommand:
    """The options that all benches share, and what follows from them. name: the subcommand.

    Raises InputError for a budget of no time.
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
        from mpctl.bench.report import check_folder
        from mpctl.rundir.directory import free_run_dir

        name = f"bench-{self.name}"
        if self.out is None:
            return Path("runs") / name if self.overwrite else free_run_dir(name).path
        if issues := list(check_folder(self.out, overwrite=self.overwrite)):
            raise InputError(issues)
        return self.out

    @property
    def command(self) -> str:
        """As typed, for reports."""
        return command_text()

    @cached_property
    def environment(self) -> BenchEnvironment:
        """This machine, as it was when it was first asked for: before anything is measured."""
        from mpctl.bench.report import bench_environment

        return bench_environment()

    def job(self, job: JobSource, *, steps: int, quick_steps: int) -> JobSource:
        """The job to be trained: so many steps, on --device, unless its own settings say otherwise.
        quick_steps: those with --quick."""
        job = job.with_default("training.steps", quick_steps if self.quick else steps)
        return job if self.device is None else job.with_default("launch.device", self.device)

    def warn(self, warnings: Iterable[str]) -> None:
        """Print these warnings, and one where other programs use the cores."""
        from mpctl.bench.report import load_warnings
        from mpctl.render.output import print_warnings

        print_warnings([*warnings, *load_warnings(self.environment)])

    def finish(
        self, report: Report, show: Callable[[Report], None], *, is_stopped: bool = False
    ) -> None:
        """Write the folder and show the report (finish.py). Raises KeyboardInterrupt then, where
        the bench is_stopped by Ctrl-C, and InputError where the folder cannot be written."""
        from mpctl.cli.bench.finish import finish

        finish(self.folder, report, show, as_json=self.as_json)
        if is_stopped:
            raise KeyboardInterrupt


def with_bench(name: str) -> Callable[[Command], Command]:
    """Add the options of `BenchCommand` to a command, whose first parameters are its job and that
    value; `with_hosts` and `with_job` go around it. name: the subcommand."""
    options = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for option in list(inspect.signature(BenchCommand).parameters.values())[1:]
    ]
    every = get_type_hints(BenchCommand, include_extras=True)
    hints = {option.name: every[option.name] for option in options}

    def decorate(command: Command) -> Command:
        @wraps(command)
        def wrapper(job: JobSource, **values: Any) -> None:
            bench = BenchCommand(
                name, **{option.name: values.pop(option.name) for option in options}
            )
            command(job, bench, **values)

        job, _, *own = inspect.signature(command).parameters.values()
        signature = inspect.Signature([job, *own, *options])
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        wrapper.__annotations__ = {**get_type_hints(command, include_extras=True), **hints}
        return wrapper

    return decorate
