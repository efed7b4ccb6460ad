"""The part of a Hugging Face directory that a rank keeps: slices of its shards, never the whole.

A parameter of ours stacks tensors of theirs on dim 0. Each block of rows that a rank keeps is
looked for in each of them; a dim-1 shard takes columns, and a transposed tensor swaps the two.
By hand, q 8 rows, k 4, v 4, rank 1 of 2 (blocks 4..8, 10..12, 14..16): rows 4..8 of q, 2..4 of k,
2..4 of v. Rows that only pad the vocabulary lie in no tensor and become zeros.

Letters: r rows and c columns of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpctl.kernels.parameters import Shard
from mpctl.weights.headers import unreadable
from mpctl.weights.hub import Hub
from mpctl.weights.names import Piece, Row

Targets = dict[str, tuple[Shard, Tensor]]  # by our name: the part kept, and where it goes


@torch.no_grad()
def fill(hub: Hub, targets: Targets) -> None:
    """Copy each target's part into it, in its dtype; raises InputError naming file and tensor."""
    for name, (shard, tensor) in targets.items():
        tensor.zero_()
        _fill(hub, hub.rows[name], shard, tensor)


def _fill(hub: Hub, row: Row, shard: Shard, tensor: Tensor) -> None:
    first = 0
    for piece in row.pieces:
        path = hub.tensors[piece.name].path
        try:
            with safe_open(path, framework="pt") as file:
                stored = file.get_slice(piece.name)
                for to, rows in _rows_in(range(first, first + piece.rows), shard):
                    for columns_to, columns in _columns_in(shard):
                        part = _cut(stored, piece, rows, columns)
                        tensor[(to, *columns_to)].copy_(part)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise unreadable(path, f"{piece.name}: {error}") from None
        first += piece.rows


def _rows_in(span: range, shard: Shard) -> Iterator[tuple[slice, slice]]:
    """Of a tensor that is `span` of our rows: (local slice of ours, slice of its own rows)."""
    blocks = shard.blocks if shard.dim == 0 else (range(shard.shape[0]),)
    offset = 0
    for block in blocks:
        start, stop = max(span.start, block.start), min(span.stop, block.stop)
        if start < stop:
            to = start - block.start + offset
            yield slice(to, to + stop - start), slice(start - span.start, stop - span.start)
        offset += len(block)


def _columns_in(shard: Shard) -> Iterator[tuple[tuple[slice, ...], slice]]:
    """(local slices of ours beyond the rows, slice of the tensor's columns)."""
    if shard.dim != 1:
        yield (), slice(None)
        return
    offset = 0
    for block in shard.blocks:
        yield (slice(offset, offset + len(block)),), slice(block.start, block.stop)
        offset += len(block)


def _cut(stored: Any, piece: Piece, rows: slice, columns: slice) -> Tensor:
    if len(piece.shape) == 1:
        return stored[rows]
    # [c, r] -> [r, c]
    return stored[columns, rows].T if piece.transposed else stored[rows, columns]


def read_piece(path: Path, name: str) -> Tensor:
    """One whole tensor of one file."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise unreadable(path, f"{name}: {error}") from None
