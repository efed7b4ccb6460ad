"""Checkpoints as tables: those of a run, the contents of one, the output of an import or export."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpctl.core.units import bytes_text, count_text, plural, ranges_text, seconds_text
from mpctl.records.checkpoint.listing import CheckpointEntry, CheckpointsDocument, InspectDocument, ParameterRow
from mpctl.render.parts import Column, DataTable, Facts, Lines, Part, Sentence
from mpctl.render.terminal import print_parts

if TYPE_CHECKING:
    from mpctl.train.weights.writer import Written


UNKNOWN = "?"


def print_checkpoints(document: CheckpointsDocument) -> None:
    """Print a line for each checkpoint on stdout, with its errors below it."""
    print_parts(checkpoints_parts(document))


def checkpoints_parts(document: CheckpointsDocument) -> Iterator[Part]:
    columns = (
        Column("step", "step"),
        Column("size", "bytes", bytes_text),
        Column("layout", _layout, left=True),
        Column("written", _written),
        Column("state", _state, left=True),
    )
    yield DataTable("", columns, document["checkpoints"])
    for entry in document["checkpoints"]:
        yield from (Sentence(words, "refused") for words in entry["problems"])
    for path in document["set_aside"]:
        yield Sentence(f"set aside as damaged: {path}", "note")


def _state(entry: CheckpointEntry) -> str:
    if entry["problems"]:
        return "✗ damaged"
    return f"✓ verified in {seconds_text(entry['seconds'])}" if entry["verified"] else "complete"


def print_inspection(document: InspectDocument, *, parameters: bool) -> None:
    """Print the contents of a checkpoint on stdout; parameters: also a line for each parameter."""
    print_parts(inspection_parts(document), full=parameters)


def inspection_parts(document: InspectDocument) -> Iterator[Part]:
    entry, shards, rows = document["checkpoint"], document["shards"], document["parameters"]
    frozen = sum(row["frozen"] for row in rows)
    updates = sorted({row["updates"] for row in rows if row["updates"] is not None})
    size = f"{count_text(document['elements'])} in {plural(len(rows), 'tensor')}"
    has_blocks = all(shard["block_checksums"] for shard in shards)
    named = [
        ("checkpoint", entry["path"]),
        ("step", str(entry["step"])),
        ("written", _written(entry)),
        ("layout", f"{_layout(entry)}: {plural(len(shards), 'shard')}"),
        ("size", bytes_text(entry["bytes"])),
        ("parameters", size + (f", {frozen} of them frozen" if frozen else "")),
        ("updates", ", ".join(map(str, updates)) or "not recorded by parameter"),
        ("checks", f"{'CRC-32 of each block, ' * has_blocks}sha256 of each file"),
    ]
    if document["loss_scale"]:
        named.append(("loss scale", f"{document['loss_scale'].get('scale', 0):g}"))
    yield Facts(named)
    yield DataTable("", PARAMETERS, rows, fold="both")


def _shape(row: ParameterRow) -> str:
    return " x ".join(map(str, row["shape"])) or "scalar"


def _split(row: ParameterRow) -> str:
    return f"dim {' and '.join(map(str, row['dims']))}" if row["dims"] else "no"


PARAMETERS = (
    Column("parameter", "name", left=True),
    Column("shape", _shape, left=True),
    Column("split", _split, left=True),
    Column("shards", lambda row: ranges_text(row["shards"], most=len(row["shards"])), left=True),
    Column("updates", lambda row: "frozen" if row["frozen"] else row["updates"] or None),
)


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
    command = Lines("Use it", [shlex.join(use)], are_commands=True)
    print_parts([Facts(list(_facts(written))), command])


def _facts(written: Written) -> Iterator[tuple[str, str]]:
    model = written.model
    layers = f"{model.layers} + {model.decoder_layers}" if model.decoder_layers else model.layers
    shape = f"{layers} layers, hidden {model.hidden}, {model.heads} heads"
    size = bytes_text(written.bytes)
    yield "class", written.architecture
    yield "model", f"{shape}, vocabulary {model.vocab:,}"
    yield "parameters", f"{count_text(written.parameters)}, {written.dtype}, {size}"
    yield "files", ", ".join(written.files)
