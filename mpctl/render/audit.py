"""An audit of a step as people read it: the modules that lose most, then a layer's totals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from mpctl.rundir.audit import AuditFigures, AuditRow, StepAudit
from mpctl.units import bytes_text, seconds_text

WORST = 10
WIDE = 150  # columns of a terminal that shows the operations too
NARROW = 105  # columns below which a table leaves out what others of it imply


def audit_parts(audit: StepAudit, width: int) -> Iterator[Table | Text]:
    """What to print of one rank's audit on a terminal of so many columns: two tables, and notes on
    what they count."""
    yield _worst(audit, width)
    yield _totals(audit, width)
    note = (
        "least: every tensor that a module is given read once, every one that is needed later "
        "written once, in one kernel a product"
    )
    if _is_timed(audit):
        note = note.replace("least:", "over: times the least,", 1) if width < NARROW else note
        note += "; saves: what a step would take less"
    note += f". {audit['assumption']}"
    yield Text(note, style="dim")
    if audit["unknown"]:
        unknown = ", ".join(audit["unknown"])
        yield Text(f"counted as one kernel each, not known to be: {unknown}", style="yellow")


def _worst(audit: StepAudit, width: int) -> Table:
    """The rows that lose most; figures are of one layer and micro batch."""
    shown, shows_operations = _shown(audit, width), width >= WIDE
    saves = ["saves"][: _is_timed(audit)]
    names = ["what loses most", "pass", "times", *shown, *saves]
    table = _table(*names, *["most of them"][:shows_operations], left=(0, 1, len(names)))
    for row in audit["rows"][:WORST]:
        cells = [row["module"], row["phase"], f"{row['times']:,.0f}", *_cells(row, shown)]
        cells += [_saving(row)][: len(saves)]
        table.add_row(*cells, *[_operations(row["operations"])][:shows_operations])
    return table


def _totals(audit: StepAudit, width: int) -> Table:
    """One layer of each kind in each pass, and the rest of a step."""
    shown = _shown(audit, width)
    table = _table("a layer, a micro batch", "pass", *shown, left=(0, 1))
    for total in audit["totals"]:
        part = total["part"] if "*" in total["part"] else f"{total['part']}, a step"
        table.add_row(part, total["phase"], *_cells(total, shown))
    return table


def _is_timed(audit: StepAudit) -> bool:
    """Whether the rates of the job's device are known."""
    return any(row["seconds"] is not None for row in audit["rows"])


def _shown(audit: StepAudit, width: int) -> list[str]:
    """The columns of figures, by name."""
    if not _is_timed(audit):
        return ["kernels", "moves", "least", "over"]
    return ["kernels", "moves", "over"] if width < NARROW else [*FIGURES]


def _table(*names: str, left: tuple[int, ...]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index in left else "right", no_wrap=True)
    return table


def _ratio(figures: AuditFigures) -> str:
    moved, least = figures["bytes"], figures["least_bytes"]
    return f"{moved / least:.1f}x" if least else ""


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(seconds)


FIGURES: dict[str, Callable[[AuditFigures], str]] = {
    "kernels": lambda figures: f"{figures['launches']:,.4g}",
    "moves": lambda figures: bytes_text(round(figures["bytes"])),
    "least": lambda figures: bytes_text(round(figures["least_bytes"])),
    "over": _ratio,
    "takes": lambda figures: _seconds(figures["seconds"]),
    "at least": lambda figures: _seconds(figures["least_seconds"]),
}


def _cells(figures: AuditFigures, shown: Sequence[str]) -> Iterator[str]:
    return (FIGURES[name](figures) for name in shown)


def _saving(row: AuditRow) -> str:
    if row["seconds"] is None or row["least_seconds"] is None:
        return ""
    return seconds_text(max(0.0, row["seconds"] - row["least_seconds"]) * row["times"])


def _operations(operations: Mapping[str, float]) -> str:
    """`mul 9, _to_copy 5, cat 3`: the operations with most launches."""
    return ", ".join(f"{name} {count:.3g}" for name, count in list(operations.items())[:3])
