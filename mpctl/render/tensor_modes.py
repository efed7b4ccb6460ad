"""Tensor modes side by side: a table of symbols, then for each tp a column of numbers a mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from mpctl.planning.summary import training_line
from mpctl.planning.tensor_modes import COSTS
from mpctl.render.console import get_console, plain_table
from mpctl.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from mpctl.planning.tensor_modes import TensorModeEntry, TensorModesDocument

FITS = {True: "yes", False: "no", None: "not known"}
Formatter = Callable[[float], str]
LAYER: tuple[tuple[str, str, Formatter], ...] = (
    ("FLOP", "flops", count_text),
    ("parameters", "parameter_bytes", bytes_text),
    ("saved activations", "saved_bytes", bytes_text),
    ("sent", "sent_bytes", bytes_text),
    ("collectives", "collectives", "{:,}".format),
    ("steps of their rings", "hops", "{:,}".format),
    ("time of messages", "tensor_seconds", seconds_text),
)
STEP: tuple[tuple[str, str, Formatter], ...] = (
    ("sent", "sent_bytes", bytes_text),
    ("time of messages", "tensor_seconds", seconds_text),
    ("step", "step_seconds", seconds_text),
    ("memory on the device", "peak_bytes", bytes_text),
)


def print_tensor_modes(document: TensorModesDocument) -> None:
    """Print the costs in symbols, what their columns mean, the job's numbers, and notes."""
    console = get_console()
    title = f"{document['job'] or 'this job'} in modes of tensor parallelism"
    console.print(Text(title, "bold"), training_line(document["training"]), "", sep="\n")
    console.print(_symbols(document))
    meanings = "; ".join(f"{name}: {words}" for name, words in document["columns"].items())
    console.print(f"{meanings}.", style="dim")
    for tp in dict.fromkeys(entry["tp"] for entry in document["modes"]):
        own = [entry for entry in document["modes"] if entry["tp"] == tp]
        if able := [entry for entry in own if entry["layer"]]:
            console.print("", _numbers(document, tp, able))
        for entry in own:
            for issue in entry["issues"]:
                console.print(Text.assemble(
                    ("✗ ", "bold red"), (f"tp {tp} in {_name(entry)}", "bold"),
                    f": {issue['message']}\n  → {issue['hint']}",
                ))  # fmt: skip
    if document["changed"]:
        console.print(f"! modes other than 1d are planned without {', '.join(document['changed'])}")
    console.print("", *(f"- {note}" for note in document["notes"]), sep="\n", style="dim")


def _symbols(document: TensorModesDocument) -> Table:
    title = "A linear layer, forward and backward, on P ranks"
    table = plain_table(title, ("mode", *document["columns"]), left=("mode",))
    for mode, costs in COSTS.items():
        table.add_row(mode, *(costs[name].symbol for name in document["columns"]))
    return table


def _name(entry: TensorModeEntry) -> str:
    return f"{entry['mode']}, depth {entry['depth']}" if entry["depth"] else entry["mode"]


def _numbers(document: TensorModesDocument, tp: int, modes: Sequence[TensorModeEntry]) -> Table:
    """The symbols' values and the job's figures, a column a mode."""
    title = f"{document['job'] or 'this job'} on tp {tp}"
    table = plain_table(title, ("", *map(_name, modes)), left=("",))
    table.columns[0].no_wrap = True
    table.add_row("grid", *(_grid(entry) for entry in modes))
    for name in document["columns"]:
        values = [entry["costs"][name]["value"] for entry in modes]
        table.add_row(name, *(_value_text(value) for value in values))
    table.add_section()
    table.add_row("one layer and micro batch, a rank", style="dim")
    for row in _rows(LAYER, [entry["layer"] for entry in modes]):
        table.add_row(*row)
    table.add_section()
    table.add_row("a step, a rank", style="dim")
    for row in _rows(STEP, [entry["step"] for entry in modes]):
        table.add_row(*row)
    table.add_row("fits", *(FITS[e["step"]["fits"]] if e["step"] else "-" for e in modes))
    return table


def _grid(entry: TensorModeEntry) -> str:
    return " x ".join(map(str, (entry["axes"] or {}).values()))


def _value_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _rows(
    figures: Sequence[tuple[str, str, Formatter]], entries: Sequence[object]
) -> Iterator[list[str]]:
    for title, key, text in figures:
        values = [entry[key] if isinstance(entry, dict) else None for entry in entries]
        yield [title, *("-" if value is None else text(value) for value in values)]
