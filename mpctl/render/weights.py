"""What an import or an export wrote, as a short table, and how to use it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from mpctl.render.console import Console
from mpctl.units import bytes_text, count_text

if TYPE_CHECKING:
    from mpctl.weights.writer import Written


def print_written(written: Written, *, use: list[str]) -> None:
    model, table = written.model, Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_row("class", written.architecture)
    layers = f"{model.layers} + {model.decoder_layers}" if model.decoder_layers else model.layers
    table.add_row("model", f"{layers} layers, hidden {model.hidden}, {model.heads} heads, "
                  f"vocabulary {model.vocab:,}")  # fmt: skip
    table.add_row("parameters", f"{count_text(written.parameters)}, {written.dtype}, "
                  f"{bytes_text(written.bytes)}")  # fmt: skip
    table.add_row("files", ", ".join(written.files))
    console = Console(highlight=False)
    console.print(table)
    line = Text.assemble(("use it      ", "dim"), shlex.join(use))
    console.print(line, soft_wrap=True)  # in one line, to be copied
