"""Reads the part of a Hugging Face directory that a rank keeps: slices of its files, never all.

A parameter of ours is filled by tensors of theirs, each a box of it. Each box that a rank keeps
(mpctl/core/shard.py), which may be cut along rows and columns, is searched for in each of them; a
transposed tensor swaps the two. Of q with 8 rows, k and v with 4, rank 1 of 2 keeps blocks 4..8,
10..12 and 14..16: rows 4..8 of q, 2..4 of k, 2..4 of v; of 8 experts, rank 1 of ep 2 reads the
matrices of 4 to 7. Rows that only pad the vocabulary are in no tensor and become zeros.
An fp8 matrix (DeepSeek-V3) is multiplied by the scale of each block of 128 x 128 in float32, and
the product is rounded once.

Letters: r rows and c columns of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpctl.core.errors import InputError, Issue
from mpctl.core.shard import Box, Shard, meetings
from mpctl.records.checkpoint.tensor_header import FP8, unreadable
from mpctl.train.checkpoint.reader import Targets
from mpctl.train.weights.hub import BLOCK, Hub, differing, scale_of
from mpctl.train.weights.names import Piece, Row, get_scheme


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
        first, *others = (piece.name for piece in row.pieces)
        names = " and ".join((first, *others)) if len(others) < 3 else f"{first} .. {others[-1]}"
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
    """Return the issue of a copy with rows that differ from `wanted`, the tensor it has to equal."""
    (piece,) = hub.rows[name].pieces
    count = int((rows != wanted).reshape(len(rows), -1).any(1).sum())
    message = f"{copy} differs from {piece.name}, which it has to equal, in {count:,} "
    message += "row" if count == 1 else "rows"
    return differing(hub.tensors[copy].path, message, copy, get_scheme(hub.model))


def _fill(hub: Hub, row: Row, shard: Shard, tensor: Tensor) -> None:
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for piece in row.pieces:
            path = hub.tensors[piece.name].path
            # Rows that only pad the vocabulary may be fewer in the target than in the file.
            spans = zip(piece.box, shard.shape, strict=True)
            cuts = {dim: (span[:size],) for dim, (span, size) in enumerate(spans)}
            try:
                for box in meetings(shard, Shard(shard.shape, cuts)):
                    if path not in files:
                        files[path] = stack.enter_context(safe_open(path, framework="pt"))
                    tensor[shard.slices(box)].copy_(_cut(hub, files[path], piece, box))
            except (SafetensorError, OSError, RuntimeError) as error:
                raise unreadable(path, f"{piece.name}: {error}") from None


def _cut(hub: Hub, file: Any, piece: Piece, box: Box) -> Tensor:
    """A box of our parameter from the tensor that contains it."""
    inside = [
        range(part.start - whole.start, part.stop - whole.start) for part, whole in zip(box, piece.box, strict=True)
    ]
    rows, *columns = inside[len(inside) - len(piece.shape) :]
    read = rows if piece.pairs is None else _covering(rows, piece.pairs[0], piece.shape[0])
    stored = file.get_slice(piece.name)
    spans = (*columns, read) if piece.transposed else (read, *columns)
    # [r, c], or transposed [c, r] -> [r, c]
    part = stored[tuple(slice(span.start, span.stop) for span in spans)]
    part = part.T if piece.transposed else part
    if hub.tensors[piece.name].dtype == FP8:
        part = part.float() * _scales(hub, piece.name, read, columns[0])
    if piece.pairs is not None:
        part = part[rows_of_pairs(rows, *piece.pairs) - read.start]
    return part.reshape([len(span) for span in box])


def _covering(rows: range, period: int, height: int) -> range:
    """The whole periods that contain these rows."""
    return range(rows.start // period * period, min(-(-rows.stop // period) * period, height))


def rows_of_pairs(rows: range, period: int, first: int) -> Tensor:
    """The rows of theirs, int64, for rows of ours: of each `period`, ours from `first` on are the
    halves of what they store as neighbouring pairs.

    >>> rows_of_pairs(range(12), 6, 2).tolist()
    [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
    """
    ours = torch.arange(rows.start, rows.stop)
    place = ours % period - first
    half = (period - first) // 2
    paired = torch.where(place < half, 2 * place, 2 * (place - half) + 1)
    return ours + torch.where(place < 0, 0, paired - place)


def as_pairs(rows: Tensor, pairs: tuple[int, int]) -> Tensor:
    """Rows of ours in the order in which they are stored. pairs: as in names.Piece."""
    stored = torch.empty_like(rows)
    stored[rows_of_pairs(range(len(rows)), *pairs)] = rows
    return stored


def _scales(hub: Hub, name: str, rows: range, columns: range) -> Tensor:
    """[r, c] float32: the scale of each element of a part of an fp8 matrix."""
    path = hub.tensors[scale_of(name)].path
    with safe_open(path, framework="pt") as file:
        blocks = file.get_tensor(scale_of(name)).float()
    down, across = (torch.arange(span.start, span.stop) // BLOCK for span in (rows, columns))
    return blocks[down][:, across]


def router_biases(hub: Hub) -> dict[str, list[float]]:
    """The correction biases [E] of each layer with experts, by the layer's name in our modules;
    empty where routers have none. Raises InputError for values that are not finite."""
    return {layer: _biases(hub, name) for layer, name in hub.biases.items()}


def _biases(hub: Hub, name: str) -> list[float]:
    path = hub.tensors[name].path
    try:
        with safe_open(path, framework="pt") as file:
            values = file.get_tensor(name).float()
    except (SafetensorError, OSError, RuntimeError) as error:
        raise unreadable(path, f"{name}: {error}") from None
    if not values.isfinite().all():
        raise InputError.of("weights-not-finite", str(path), f"{name}: NaN or infinite")
    return [float(value) for value in values]
