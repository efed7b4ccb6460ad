"""Rows for pieces that were added to a tokenizer: each the mean of the rows it was split into.

Old row v of a table E is unchanged; a new piece that stands for the old ids p_1 .. p_n gets

    E'[v] = (E[p_1] + ... + E[p_n]) / n

in the word table and in a separate output layer (Gee et al., EMNLP 2022, "Fast Vocabulary
Transfer"). For E = [1, 2, 4], id 3 stands for 0, 2 and id 4 for 2, 2, 0: rows 2.5 and 3. Sums are
float64 and rounded once, so a row has the same bits whichever rank computes it. A rank reads its
old rows and those that its new ones need; rows past the last piece keep their random initial
values. Special tokens at the top of a family's vocabulary (train/data/tokenizer.py) move up with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.core.shard import Shard
from mpctl.model.families import get_table
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.records.checkpoint.tensor_header import unreadable
from mpctl.spec.model import ModelSpec
from mpctl.train.checkpoint.reader import OpenCheckpoint, Targets
from mpctl.train.data.extend import TokenizerExtension
from mpctl.train.layers.parameters import take
from mpctl.train.weights.hub import Hub
from mpctl.train.weights.origin import differences, is_extended
from mpctl.train.weights.reader import not_equal

ReadRows = Callable[[Sequence[int]], Tensor]
"""Rows of a table by ascending ids, [ids, ...], in the dtype that is stored."""
ROWS_AT_ONCE = 4096


@torch.no_grad()
def fill_tables(
    origin: Hub | SavedModel,
    model: ModelSpec,
    targets: Targets,
    extension: TokenizerExtension | None,
    *,
    reserved: int = 0,
) -> Targets:
    """Fill the word table and the head where the data's extension adds rows to the origin's;
    returns the remaining targets, all of them where it does not.

    reserved: ids at the top of the vocabulary that no text uses. InputError where rows are missing
    that no extension explains.
    """
    if not is_extended(model, origin, extension, reserved=reserved):
        issues = [i for i in differences(model, origin.model, origin.folder) if i.where == "model.vocab"]
        if issues:
            raise InputError(issues)
        return targets
    assert extension is not None
    tables = vocabulary_tables(model)
    top = range(model.vocab - reserved, model.vocab)
    for name in sorted(tables & targets.keys()):
        read_rows, (shard, tensor) = row_reader(origin, name), targets[name]
        for to, ids in rows_of_rank(shard, range(extension.vocab_size)):
            tensor[to].copy_(_columns(shard, extended_rows(read_rows, ids, extension)))
        for to, ids in rows_of_rank(shard, top):
            then = [number - model.vocab + origin.model.vocab for number in ids]
            tensor[to].copy_(_columns(shard, read_rows(then)))
    return {name: target for name, target in targets.items() if name not in tables}


def vocabulary_tables(model: ModelSpec) -> set[str]:
    """Parameters with a row for each piece: word table, head, and a bias of the head."""
    weights = get_table(model, tp=1).weights()
    return {weight.name for weight in weights if weight.dims[0] == "vocab"}


def rows_of_rank(shard: Shard, wanted: range) -> Iterator[tuple[slice, range]]:
    """The rows of `wanted` that this rank holds, some at a time: (slice of its rows, their ids).

    >>> list(rows_of_rank(Shard((8, 2), {0: (range(4, 8),)}), range(6)))
    [(slice(0, 2, None), range(4, 6))]
    """
    offset = 0
    for block in shard.blocks(0):
        end = min(block.stop, wanted.stop)
        for start in range(max(block.start, wanted.start), end, ROWS_AT_ONCE):
            ids = range(start, min(start + ROWS_AT_ONCE, end))
            to = offset + start - block.start
            yield slice(to, to + len(ids)), ids
        offset += len(block)


def _columns(shard: Shard, rows: Tensor) -> Tensor:
    """The columns of a table that this rank holds, from full rows [rows, ...]."""
    columns = {dim: blocks for dim, blocks in shard.cuts.items() if dim > 0}
    return take(Shard(tuple(rows.shape), columns), rows) if columns else rows


def extended_rows(read_rows: ReadRows, wanted: range, extension: TokenizerExtension) -> Tensor:
    """Rows `wanted` of the extended table, [wanted, ...]: float64 if stored so, else float32.

    A new row is the mean of the rows of the old ids that it stands for.
    """
    first = extension.old_vocab_size
    assert wanted.stop <= extension.vocab_size, f"{wanted} of {extension.vocab_size} rows"
    new = slice(max(0, wanted.start - first), max(0, wanted.stop - first))
    pieces = extension.pieces[new]
    old = range(wanted.start, min(wanted.stop, first))
    ids = sorted({*old, *chain.from_iterable(pieces)})
    index = {number: i for i, number in enumerate(ids)}
    rows = read_rows(ids)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    old_rows = rows[[index[number] for number in old]]
    means = [rows[[index[i] for i in piece]].double().mean(0).to(rows.dtype) for piece in pieces]
    return torch.cat([old_rows, torch.stack(means)]) if means else old_rows


# ---------------------------------------------------------------- rows of files


def row_reader(origin: Hub | SavedModel, name: str) -> ReadRows:
    """Reads only the requested rows, from whichever files hold them."""
    if isinstance(origin, Hub):
        return partial(_hub_rows, origin, name)
    checkpoint = OpenCheckpoint.of(origin.checkpoint)
    shape = checkpoint.shape_of(name)
    return lambda ids: checkpoint.part(name, "value", Shard(shape, {0: tuple(spans(ids))}))


def _hub_rows(hub: Hub, name: str, ids: Sequence[int]) -> Tensor:
    (piece,) = hub.rows[name].pieces
    rows = _stored_rows(hub.tensors[piece.name].path, piece.name, ids)
    for copy in hub.copies.get(name, ()):
        other = _stored_rows(hub.tensors[copy].path, copy, ids)
        if not torch.equal(other, rows):
            raise InputError([not_equal(hub, name, copy, other, rows)])
    return rows


def _stored_rows(path: Path, name: str, ids: Sequence[int]) -> Tensor:
    """Rows of one tensor of one file, consecutive ones in one read."""
    try:
        with safe_open(path, framework="pt") as file:
            stored = file.get_slice(name)
            return torch.cat([stored[span.start : span.stop] for span in spans(ids)])
    except (SafetensorError, OSError, RuntimeError) as error:
        raise unreadable(path, f"{name}: {error}") from None


def spans(ids: Sequence[int]) -> Iterator[range]:
    """
    >>> list(spans([0, 1, 2, 5, 7, 8]))
    [range(0, 3), range(5, 6), range(7, 9)]
    """
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            yield range(ids[start], ids[end - 1] + 1)
            start = end
