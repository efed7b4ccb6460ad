"""Presets as tables, and one preset as the TOML that it is."""

from __future__ import annotations

import sys
from typing import Any

from rich.syntax import Syntax
from rich.table import Table

from mpctl.render.console import Console
from mpctl.spec.presets import KINDS, Kind, presets_root


def print_presets(kinds: dict[Kind, dict[str, dict[str, Any]]]) -> None:
    console = Console()
    for kind, tables in kinds.items():
        grid = Table(title=kind, title_justify="left", box=None, pad_edge=False)
        grid.add_column("name", style="bold", no_wrap=True)
        grid.add_column("what", overflow="fold")
        for name, table in tables.items():
            grid.add_row(name, _summary(kind, table))
        console.print(grid, "")


def print_preset(name: str, kinds: list[Kind]) -> None:
    """The file itself: its comments carry sources that the keys cannot.

    Coloured on a terminal; elsewhere byte for byte: `mpctl presets NAME > x.toml` is a copy.
    """
    paths = [presets_root() / kind / f"{name}.toml" for kind in KINDS if kind in kinds]
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
