"""Loss and perplexity by corpus, as a table on stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from mpctl.render.console import get_console, plain_table
from mpctl.units import seconds_text

if TYPE_CHECKING:
    from mpctl.inference.evaluate import EvalDocument

COLUMNS = ("corpus", "loss", "perplexity", "samples", "tokens", "time")
RECORDED = "recorded in training"


def print_evaluation(document: EvalDocument) -> None:
    """Print loss and perplexity of each corpus on stdout, and what was evaluated."""
    console, rows = get_console(), document["corpora"]
    is_recorded = any(row["recorded_loss"] is not None for row in rows)
    table = plain_table("", (*COLUMNS, *([RECORDED] if is_recorded else [])), left=["corpus"])
    for row in rows:
        recorded = [_number(row["recorded_loss"])] if is_recorded else []
        table.add_row(
            row["name"], _number(row["loss"]), _number(row["perplexity"], 2),
            f"{row['samples']:,}", f"{row['tokens']:,}", seconds_text(row["seconds"]), *recorded,
        )  # fmt: skip
    console.print(table)
    console.print(Text(_source(document), style="dim"))


def _source(document: EvalDocument) -> str:
    step = "" if document["step"] is None else f"step {document['step']} of "
    layout = " ".join(f"{axis} {n}" for axis, n in document["sizes"].items() if n > 1)
    parts = [f"{step}{document['model']}", f"samples of {document['seq_length']} tokens",
             document["dtype"], document["device"], layout or "one rank"]  # fmt: skip
    return ", ".join(parts)


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
