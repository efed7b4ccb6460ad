"""The option --fail-if of `mpctl compare`: gates on what a change of a job costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.core.errors import DOES_NOT_FIT, GATE_FAILED

if TYPE_CHECKING:
    from mpctl.plan.planning.compare import CompareDocument

FailIfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if",
        metavar="GATE",
        help='Exit with code 4 where this holds for a job after the first: "memory>+2%" (2 % above the first '
        'job\'s), "step>16s", "tokens<-5%", "mfu<40%", "price>+1%"; repeatable.',
        show_default=False,
    ),
]


def exit_if_failed(document: CompareDocument) -> None:
    """Exit with the code of a failed gate if one failed, else, where there are gates, with that of a job after
    the first that does not fit."""
    if any(gate["failed"] for gate in document["gates"]):
        raise typer.Exit(GATE_FAILED)
    if document["gates"] and False in document["fits"][1:]:
        raise typer.Exit(DOES_NOT_FIT)
