"""Figures with their formulas, one below the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rich.text import Text

from mpctl.estimate.figure import Figure, Unit
from mpctl.planning.summary import training_line
from mpctl.render.console import Console
from mpctl.units import bytes_text, count_text, rate_text, seconds_text

if TYPE_CHECKING:
    from mpctl.planning.summary import TrainingEntry

TEXTS: dict[Unit, Callable[[float], str]] = {
    "B": bytes_text,
    "s": seconds_text,
    "FLOP": lambda value: f"{count_text(value)}FLOP",
    "FLOP/s": rate_text,
    "B/s": lambda value: f"{bytes_text(value)}/s",
    "%": lambda value: f"{value:.1f} %",
    "": lambda value: f"{value:g}",
}


def print_figures(figures: Iterable[Figure], training: TrainingEntry) -> None:
    """Print figures on stdout under how the job is trained: name and value, and below them formula,
    numbers and source."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(training_line(training))
    for figure in figures:
        console.print(
            Text.assemble((figure.name, "bold"), " = ", (TEXTS[figure.unit](figure.value), "cyan"))
        )
        console.print(Text(f"    {figure.formula}"))
        console.print(Text(f"    {figure.numbers}", "dim"))
        if figure.source:
            console.print(Text(f"    {figure.source}", "dim italic"))
