"""Options that several benches share, and what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mpctl.errors import InputError

DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where ranks run; by default as the job says.", show_default=False),
]
OutOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the report; by default a new runs/bench-NAME."),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the bench in --out.")]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Measure less, in under a minute; figures are rougher.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Begin no round that would end later than this after the first.",
        show_default=False,
    ),
]
QUICK_SECONDS = 45.0


def bench_folder(name: str, out: Path | None, *, overwrite: bool) -> Path:
    """The folder of a bench's report: --out, or a new runs/bench-NAME. Raises InputError where it
    is occupied and may not be replaced."""
    from mpctl.bench.folder import check_folder
    from mpctl.rundir.directory import free_run_dir

    if out is None:
        default = Path("runs") / f"bench-{name}"
        return default if overwrite else free_run_dir(f"bench-{name}").path
    if issues := list(check_folder(out, overwrite=overwrite)):
        raise InputError(issues)
    return out


def budget_seconds(budget: float | None, *, quick: bool) -> float | None:
    """Seconds that the rounds may take. Raises InputError for a budget of no time."""
    if budget is not None and not budget > 0:
        raise InputError.of("bad-budget", "--budget", f"{budget:g} s is no time to measure in",
                            "give seconds above 0, such as --budget 60")  # fmt: skip
    return budget if budget is not None else QUICK_SECONDS if quick else None


def command_text() -> str:
    """The command line of this process, as it is noted in reports."""
    import shlex
    import sys

    return shlex.join(["mpctl", *sys.argv[1:]])
