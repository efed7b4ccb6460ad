"""Presets as tables, and one preset as the TOML that it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.syntax import Syntax
from rich.table import Table

from mpctl.render.console import Console
from mpctl.spec.presets import Kind, PresetFile


def print_presets(kinds: Mapping[Kind, Mapping[str, PresetFile]]) -> None:
    """A table for each kind; what comes from a folder of MPCTL_PRESETS is shown with its file."""
    console = Console()
    for kind, files in kinds.items():
        grid = Table(title=kind, title_justify="left", box=None, pad_edge=False)
        grid.add_column("name", style="bold", no_wrap=True)
        grid.add_column("what", overflow="fold")
        for name, file in files.items():
            grid.add_row(name, _summary(kind, file.read()) + _origin(file))
        console.print(grid, "")


def _origin(file: PresetFile) -> str:
    """Where a user's preset comes from: nothing for a bundled one."""
    if file.is_bundled:
        return ""
    return f" (from {file.path}{', hides another of this name' if file.hides else ''})"


def print_preset(paths: Sequence[Path]) -> None:
    """The files themselves: their comments carry sources that the keys cannot.

    Coloured on a terminal; elsewhere byte for byte: `mpctl presets NAME > x.toml` is a copy.
    """
    if not sys.stdout.isatty():
        sys.stdout.buffer.write(b"\n".join(path.read_bytes() for path in paths))
        return
    for path in paths:
        text = path.read_text("utf-8").rstrip()
        Console().print(Syntax(text, "toml", word_wrap=True, background_color="default"))


def _summary(kind: Kind, table: dict[str, Any]) -> str:
    if kind == "devices":
        rates = table.get("peak_flops", {})
        peak = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in rates.items())
        return f"{table.get('memory_bytes', 0) / 2**30:g} GiB; TFLOP/s: {peak}"
    if kind == "clusters":
        return f"{table.get('nodes')} x {table.get('gpus_per_node')} {table.get('device')}"
    if kind == "models":
        keys = ("layers", "hidden", "heads", "vocab", "seq_length")
        return f"{table.get('family')}: " + ", ".join(f"{k} {table[k]}" for k in keys if k in table)
    return str(table.get("description", table.get("name", "")))
