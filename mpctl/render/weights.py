"""What an import or an export wrote, as a short table, and how to use it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from mpctl.render.console import Console, NamedRows
from mpctl.units import bytes_text, count_text

if TYPE_CHECKING:
    from mpctl.weights.writer import Written


def print_written(written: Written, *, use: list[str]) -> None:
    """Print what was written on stdout. use: the command that uses it."""
    console = Console(highlight=False)
    console.print(NamedRows(_facts(written)))
    line = Text.assemble(("use it      ", "dim"), shlex.join(use))
    console.print(line, soft_wrap=True)  # in one line, to be copied


def _facts(written: Written) -> Iterator[tuple[str, str]]:
    model = written.model
    layers = f"{model.layers} + {model.decoder_layers}" if model.decoder_layers else model.layers
    shape = f"{layers} layers, hidden {model.hidden}, {model.heads} heads"
    size = bytes_text(written.bytes)
    yield "class", written.architecture
    yield "model", f"{shape}, vocabulary {model.vocab:,}"
    yield "parameters", f"{count_text(written.parameters)}, {written.dtype}, {size}"
    yield "files", ", ".join(written.files)
