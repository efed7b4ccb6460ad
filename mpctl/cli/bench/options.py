"""Options that several benches share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

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


def command_text() -> str:
    """The command line of this process, as it is noted in reports."""
    import shlex
    import sys

    return shlex.join(["mpctl", *sys.argv[1:]])
