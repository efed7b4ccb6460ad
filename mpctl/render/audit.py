"""An audit of a step as people read it: the modules that lose most, then a layer's totals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from mpctl.rundir.audit import AuditFigures, AuditRow, StepAudit
from mpctl.units import bytes_text, seconds_text

WORST = 10
WIDE = 150  # columns of a terminal that shows the operations too
NAMES = ("kernels", "moves", "least", "over", "takes", "least")


def audit_parts(audit: StepAudit, width: int) -> Iterator[Table | Text]:
    """What to print of one rank's audit on a terminal of so many columns: two tables, and notes on
    what they count."""
    yield _worst(audit, shows_operations=width >= WIDE)
    yield _totals(audit)
    note = (
        f"least: every tensor that a module is given read once, every one that is needed later "
        f"written once, in one kernel a product. {audit['assumption']}"
    )
    yield Text(note, style="dim")
    if audit["unknown"]:
        unknown = ", ".join(audit["unknown"])
        yield Text(f"counted as one kernel each, not known to be: {unknown}", style="yellow")


def _worst(audit: StepAudit, *, shows_operations: bool) -> Table:
    """The rows that lose most; figures are of one layer and micro batch."""
    names = ["what loses most", "pass", "times", *NAMES, "a step saves"]
    table = _table(*names, *["most of them"][:shows_operations], left=(0, 1, len(names)))
    for row in audit["rows"][:WORST]:
        cells = [row["module"], row["phase"], f"{row['times']:,.0f}", *_cells(row), _saving(row)]
        table.add_row(*cells, *[_operations(row["operations"])][:shows_operations])
    return table


def _totals(audit: StepAudit) -> Table:
    """One layer of each kind in each pass, and the rest of a step."""
    table = _table("a layer, a micro batch", "pass", *NAMES, left=(0, 1))
    for total in audit["totals"]:
        part = total["part"] if "*" in total["part"] else f"{total['part']}, a step"
        table.add_row(part, total["phase"], *_cells(total))
    return table


def _table(*names: str, left: tuple[int, ...]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index in left else "right", no_wrap=True)
    return table


def _cells(figures: AuditFigures) -> Iterator[str]:
    """Kernels, bytes, least bytes, their ratio, seconds, least seconds."""
    moved, least = figures["bytes"], figures["least_bytes"]
    yield f"{figures['launches']:,.4g}"
    yield from (bytes_text(round(moved)), bytes_text(round(least)))
    yield f"{moved / least:.1f}x" if least else ""
    for seconds in (figures["seconds"], figures["least_seconds"]):
        yield "" if seconds is None else seconds_text(seconds)


def _saving(row: AuditRow) -> str:
    if row["seconds"] is None or row["least_seconds"] is None:
        return ""
    return seconds_text(max(0.0, row["seconds"] - row["least_seconds"]) * row["times"])


def _operations(operations: Mapping[str, float]) -> str:
    """`mul 9, _to_copy 5, cat 3`: the operations with most launches."""
    return ", ".join(f"{name} {count:.3g}" for name, count in list(operations.items())[:3])
