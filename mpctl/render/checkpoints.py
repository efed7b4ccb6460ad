"""Checkpoints as tables: those of a run, the contents of one, the output of an import or export."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from mpctl.core.units import bytes_text, count_text, plural, ranges_text, seconds_text
from mpctl.records.checkpoint.listing import CheckpointEntry, CheckpointsDocument, InspectDocument, ParameterRow
from mpctl.render.console import Console, NamedRows, get_console, marked, plain_table

if TYPE_CHECKING:
    from mpctl.train.weights.writer import Written


UNKNOWN = "?"


def print_checkpoints(document: CheckpointsDocument) -> None:
    """Print a line for each checkpoint on stdout, with its errors below it."""
    console, rows = get_console(), []
    for entry in document["checkpoints"]:
        known = f"verified in {seconds_text(entry['seconds'])}" if entry["verified"] else "complete"
        state = Text("damaged", "red") if entry["problems"] else Text(known, "green")
        cells = (str(entry["step"]), bytes_text(entry["bytes"]), _layout(entry), _written(entry))
        rows.append((*cells, state))
    columns = ("step", "size", "layout", "written", "state")
    console.print(plain_table("", columns, rows, left=("layout", "state")))
    for entry in document["checkpoints"]:
        for words in entry["problems"]:
            console.print(marked("✗", words), soft_wrap=True)
    for path in document["set_aside"]:
        console.print(Text(f"set aside as damaged: {path}", "dim"), soft_wrap=True)


def print_inspection(document: InspectDocument, *, parameters: bool) -> None:
    """Print the contents of a checkpoint on stdout; parameters: also a line for each parameter."""
    console, entry = get_console(), document["checkpoint"]
    shards, rows = document["shards"], document["parameters"]
    frozen = sum(row["frozen"] for row in rows)
    updates = sorted({row["updates"] for row in rows if row["updates"] is not None})
    named = [
        ("checkpoint", entry["path"]),
        ("step", str(entry["step"])),
        ("written", _written(entry)),
        ("layout", f"{_layout(entry)}: {plural(len(shards), 'shard')}"),
        ("size", bytes_text(entry["bytes"])),
        (
            "parameters",
            f"{count_text(document['elements'])} in {plural(len(rows), 'tensor')}"
            + (f", {frozen} of them frozen" if frozen else ""),
        ),
        ("updates", ", ".join(map(str, updates)) or "not recorded by parameter"),
        (
            "checks",
            "CRC-32 of each block, sha256 of each file"
            if all(shard["block_checksums"] for shard in shards)
            else "sha256 of each file",
        ),
    ]
    if document["loss_scale"]:
        named.append(("loss scale", f"{document['loss_scale'].get('scale', 0):g}"))
    console.print(NamedRows(named))
    if parameters:
        _print_parameters(rows)


def _print_parameters(rows: list[ParameterRow]) -> None:
    table = []
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        split = f"dim {' and '.join(map(str, row['dims']))}" if row["dims"] else "no"
        updates = "frozen" if row["frozen"] else str(row["updates"] or "")
        shards = ranges_text(row["shards"], most=len(row["shards"]))
        table.append((Text(row["name"]), shape, split, shards, updates))
    columns = ("parameter", "shape", "split", "shards", "updates")
    get_console().print(plain_table("", columns, table, left=columns[:-1]))


def _layout(entry: CheckpointEntry) -> str:
    """`tp 4 (2d) x pp 1 x ep 2`; the mode where it is known and not 1d, sizes of experts where they
    are not 1."""
    if entry["tp"] is None:
        return UNKNOWN
    depth = f", depth {entry['tensor_depth']}" if entry["tensor_depth"] else ""
    mode = f" ({entry['tensor_mode']}{depth})" if entry["tensor_mode"] not in (None, "1d") else ""
    sizes = {"ep": entry["ep"], "etp": entry["etp"]}
    experts = "".join(f" x {axis} {size}" for axis, size in sizes.items() if size != 1)
    return f"tp {entry['tp']}{mode} x pp {entry['pp']}{experts}"


def _written(entry: CheckpointEntry) -> str:
    """`2026-11-22 03:51:31 UTC`."""
    return (entry["written"] or UNKNOWN).replace("T", " ").replace("+00:00", " UTC")


def print_written(written: Written, *, use: list[str]) -> None:
    """Print what was written on stdout. use: the command that uses it."""
    console = Console(highlight=False)
    console.print(NamedRows(_facts(written)))
    line = Text.assemble(("use it      ", "dim"), shlex.join(use))
    console.print(line, soft_wrap=True)  # on one line, for copying


def _facts(written: Written) -> Iterator[tuple[str, str]]:
    model = written.model
    layers = f"{model.layers} + {model.decoder_layers}" if model.decoder_layers else model.layers
    shape = f"{layers} layers, hidden {model.hidden}, {model.heads} heads"
    size = bytes_text(written.bytes)
    yield "class", written.architecture
    yield "model", f"{shape}, vocabulary {model.vocab:,}"
    yield "parameters", f"{count_text(written.parameters)}, {written.dtype}, {size}"
    yield "files", ", ".join(written.files)
