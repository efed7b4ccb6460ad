"""Reads the part of a Hugging Face directory that a rank keeps: slices of its files, never all.

A parameter of ours stacks tensors of theirs on dim 0. Each box that a rank keeps (mpctl/shard.py),
which may be cut along rows and columns, is searched for in each of them; a transposed tensor swaps
the two. Of q with 8 rows, k and v with 4, rank 1 of 2 keeps blocks 4..8, 10..12 and 14..16: rows
4..8 of q, 2..4 of k, 2..4 of v. Rows that only pad the vocabulary are in no tensor and become
zeros.

Letters: r rows and c columns of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpctl.checkpoint.tensor_header import unreadable
from mpctl.errors import InputError, Issue
from mpctl.shard import Box, Shard, meetings
from mpctl.weights.hub import Hub, differing
from mpctl.weights.names import Piece, Row, get_scheme

Targets = dict[str, tuple[Shard, Tensor]]
"""By our parameter's name: the part of it that this rank holds, and the tensor to fill with it."""


@torch.no_grad()
def fill(hub: Hub, targets: Targets) -> None:
    """Copy each target's part into it, in its dtype.

    Raises InputError naming files and tensors: what cannot be read, values that are not finite, and
    tensors that should be equal and are not.
    """
    issues: list[Issue] = []
    for name, (shard, tensor) in targets.items():
        tensor.zero_()
        row = hub.rows[name]
        _fill(hub, row, shard, tensor)
        issues += list(_not_finite(hub, row, tensor)) or _differing(hub, name, shard, tensor)
    if issues:
        raise InputError(issues)


def _not_finite(hub: Hub, row: Row, tensor: Tensor) -> Iterator[Issue]:
    count = tensor.numel() - int(tensor.isfinite().sum())
    if count:
        names = " and ".join(piece.name for piece in row.pieces)
        dtype = str(tensor.dtype).removeprefix("torch.")
        values = "1 value is" if count == 1 else f"{count:,} values are"
        message = f"{names}: {values} NaN or infinite in {dtype}"
        hint = "use a checkpoint from before they became so, or a wider training.dtype"
        yield Issue("weights-not-finite", str(hub.tensors[row.pieces[0].name].path), message, hint)


def _differing(hub: Hub, name: str, shard: Shard, tensor: Tensor) -> Iterator[Issue]:
    """Copies of a parameter that hold other values, in the part that a rank keeps."""
    for copy in hub.copies.get(name, ()):
        (piece,) = hub.rows[name].pieces
        row = replace(hub.rows[name], pieces=(replace(piece, name=copy),))
        other = torch.zeros_like(tensor)
        _fill(hub, row, shard, other)
        if not torch.equal(other, tensor):
            yield not_equal(hub, name, copy, other, tensor)


def not_equal(hub: Hub, name: str, copy: str, rows: Tensor, wanted: Tensor) -> Issue:
    """The issue of a copy whose rows differ from `wanted`, the tensor that it has to equal."""
    (piece,) = hub.rows[name].pieces
    count = int((rows != wanted).reshape(len(rows), -1).any(1).sum())
    message = f"{copy} differs from {piece.name}, which it has to equal, in {count:,} "
    message += "row" if count == 1 else "rows"
    return differing(hub.tensors[copy].path, message, copy, get_scheme(hub.model))


def _fill(hub: Hub, row: Row, shard: Shard, tensor: Tensor) -> None:
    first = 0
    for piece in row.pieces:
        path = hub.tensors[piece.name].path
        try:
            with safe_open(path, framework="pt") as file:
                stored = file.get_slice(piece.name)
                rows = range(first, min(first + piece.rows, shard.shape[0]))
                for box in meetings(shard, Shard(shard.shape, {0: (rows,)})):
                    tensor[shard.slices(box)].copy_(_cut(stored, piece, first, box))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise unreadable(path, f"{piece.name}: {error}") from None
        first += piece.rows


def _cut(stored: Any, piece: Piece, first: int, box: Box) -> Tensor:
    """A box of our parameter from the stored tensor, whose first row is our row `first`."""
    rows = slice(box[0].start - first, box[0].stop - first)
    columns = tuple(slice(span.start, span.stop) for span in box[1:])
    # [c, r] -> [r, c]
    return stored[(*columns, rows)].T if piece.transposed else stored[(rows, *columns)]
