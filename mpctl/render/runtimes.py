"""One layout under several runtimes, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from mpctl.planning.runtimes import UnderRuntime
from mpctl.planning.summary import plan_summary
from mpctl.render.compare import FITS
from mpctl.render.console import plain_table
from mpctl.units import bytes_text, seconds_text

FIGURES = ("step", "9 of 10 runs", "MFU", "memory", "fits")


def runtimes_table(runtimes: Sequence[UnderRuntime]) -> Table:
    """A row a runtime: its step with the band, MFU, memory on the device, and the option that
    writes the plan for it; where it does not run the layout, why."""
    columns = ("runtime", *FIGURES, "how to run it")
    title = "\nThis layout under other software"
    table = plain_table(title, columns, left=("runtime", "fits", "how to run it"))
    for column in table.columns[:-1]:
        column.no_wrap = True
    for under in runtimes:
        table.add_row(under.runtime, *_cells(under), _how(under))
    return table


def _cells(under: UnderRuntime) -> Iterator[str]:
    if under.plan is None:
        yield from ("-" for _ in FIGURES)
        return
    summary = plan_summary(under.plan)
    low, high = summary.step_seconds_low, summary.step_seconds_high
    yield "-" if summary.step_seconds is None else seconds_text(summary.step_seconds)
    yield "-" if low is None or high is None else f"{seconds_text(low)} to {seconds_text(high)}"
    yield "-" if summary.mfu is None else f"{summary.mfu:.0%}"
    yield bytes_text(summary.device_bytes or 0)
    yield FITS[summary.fits]


def _how(under: UnderRuntime) -> str:
    if under.plan is None:
        return f"does not run {', '.join(under.missing)}"
    if under.profile.runs.launched:
        return "mpctl launch"
    return ", ".join(f"--emit {launcher}" for launcher in under.profile.runs.emit)
