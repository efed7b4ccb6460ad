"""Bytes of activations of one micro batch in a model chunk: what is saved until its backward, and
the most that its backward has besides.

What is saved is the sum of the operator table's tensors (estimate/saved_activations.py). The peak
is found by going backward through the chunk, from its exit to its entry: at each point what lies
behind is freed, and there are gradients of the hidden states, of a layer's products, of weights on
their way to the gradient buffer, and what is recomputed. The dW of a tied word table waits from the
head for the embedding's.

By hand, gpt of one fp32 layer, rows r = bs, no dropout: at the end of the MLP's backward there are
the gradients of the hidden states r h and of its activation r f, and a matrix's h f, beside all
that was saved.

Letters: b batch, s sequence, h hidden, f MLP width, v vocabulary; t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mpctl.estimate.activation_shapes import ActivationShapes, activation_shapes
from mpctl.estimate.loss_memory import loss_bytes
from mpctl.estimate.product_memory import (
    cast_bytes,
    lookup_bytes,
    matrix_bytes,
    product_bytes,
    table_bytes,
)
from mpctl.estimate.saved_activations import (
    batch_activations,
    entry_activations,
    exit_activations,
    layer_activations,
    shared_activations,
)
from mpctl.families import get_family
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.matmul import AttentionOp, Dims
from mpctl.operators.saved import SavedPart, SavedTensor, hidden_saved
from mpctl.operators.table import StageSlice


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Bytes of activations of one micro batch in one model chunk.

    saved: from its forward to its backward. peak: the most at once during its backward, `saved`
    included. Zero-bubble schedules split the backward in two; deferred: held from its first part
    (gradients of inputs) until its second (gradients of weights). split_peak: the most at once
    during the first part.
    """

    saved: float = 0.0
    peak: float = 0.0
    deferred: float = 0.0
    split_peak: float = 0.0

    @property
    def temporary(self) -> float:
        """Bytes that a backward needs beside what was saved."""
        return self.peak - self.saved


class LayerBytes(NamedTuple):
    """Bytes of activations of one micro batch in one layer.

    saved, deferred: as a chunk's. temporary: the most that its backward needs besides.
    split_temporary: the same of a backward that leaves out the weights' gradients, with what it has
    deferred so far.
    """

    saved: float
    temporary: float
    deferred: float
    split_temporary: float


def stage_chunks(
    layout: JobLayout, stage: int, shapes: ActivationShapes | None = None
) -> tuple[ChunkBytes, ...]:
    """Bytes of activations of one micro batch in each chunk of a stage.

    shapes: `activation_shapes(layout)`, where it was worked out before.
    """
    model, shapes = layout.model, shapes or activation_shapes(layout)
    arrays = tuple(array.dims for array in get_family(model.family).batch_arrays.values())
    rest = arrays, model.tied_embeddings, layout.profile.memory.logit_bytes
    chunks = [
        tuple(map(_StackPart.of, layout.chunk_slices(stage, chunk)))
        for chunk in range(len(layout.stages[stage]))
    ]
    sizes = {parts: _chunk(shapes, parts, *rest) for parts in dict.fromkeys(chunks)}
    return tuple(sizes[parts] for parts in chunks)


class _StackPart(NamedTuple):
    """What a chunk has of a stack, as far as memory goes.

    layers: how many of its layers save anything, by their attentions. entry, exit: what the family
    says these ends save, None where the chunk does not have them. has_logits: whether the exit
    gives logits. predicted: attentions of the exit's own layers (multi-token prediction), each of
    which gives logits too.
    """

    attentions: tuple[AttentionOp, ...]
    layers: tuple[tuple[tuple[AttentionOp, ...], int], ...]
    entry: tuple[SavedTensor, ...] | None
    exit: tuple[SavedTensor, ...] | None
    has_logits: bool
    predicted: tuple[AttentionOp, ...] = ()

    @property
    def seq(self) -> str:
        return self.attentions[0].queries

    @property
    def has_cross_attention(self) -> bool:
        return any(attention.is_cross for attention in self.attentions)

    @classmethod
    def of(cls, stage_slice: StageSlice) -> _StackPart:
        stack = stage_slice.stack
        counts: dict[tuple[AttentionOp, ...], int] = {}
        for count, flow in stage_slice.blocks:
            if flow.after:
                counts[flow.cores] = counts.get(flow.cores, 0) + count
        return cls(
            stack.cores,
            tuple(counts.items()),
            stack.entry.saved if stage_slice.has_entry else None,
            stack.exit.saved if stage_slice.has_exit else None,
            stage_slice.has_exit and stack.has_logits,
            stack.exit.cores if stage_slice.has_exit else (),
        )


class _Piece(NamedTuple):
    """`number` equal parts of a chunk: bytes of each as a layer's; shared: bytes that all of them
    save together."""

    saved: float
    temporary: float = 0.0
    deferred: float = 0.0
    split_temporary: float = 0.0
    number: int = 1
    shared: float = 0.0

    @property
    def total(self) -> float:
        return self.number * self.saved + self.shared

    @property
    def split_peak(self) -> float:
        """The most in a backward in two, beyond what was saved: in its first part or its last."""
        done = (self.number - 1) * (self.deferred - self.saved)
        return self.split_temporary + max(0.0, done)


@lru_cache(maxsize=65536)
def _chunk(
    shapes: ActivationShapes,
    parts: tuple[_StackPart, ...],
    arrays: tuple[Dims, ...],
    is_tied: bool,
    logit_bytes: float,
) -> ChunkBytes:
    """The peak of a backward through the chunk, piece by piece from its exit."""
    makes_source = any(part.exit is not None and not part.has_logits for part in parts)
    pieces = [_pieces(shapes, part, logit_bytes, makes_source=makes_source) for part in parts]
    saved = sum(piece.total for of_part in pieces for piece in of_part)
    has_both_ends = any(p.entry is not None for p in parts) and any(
        p.exit is not None for p in parts
    )
    table = table_bytes(shapes)
    remaining = peak = split_peak = saved
    waiting = deferred = 0.0
    for part, of_part in zip(reversed(parts), reversed(pieces), strict=True):
        for piece in reversed(of_part):
            peak = max(peak, remaining + waiting + piece.temporary)
            split_peak = max(split_peak, remaining + waiting + deferred + piece.split_peak)
            remaining -= piece.total
            deferred += piece.number * piece.deferred
            waiting = table if is_tied and has_both_ends else 0.0
        if part.entry is not None:
            looked_up = lookup_bytes(shapes, part.seq)
            peak = max(peak, remaining + waiting + looked_up)
            split_peak = max(split_peak, remaining + waiting + deferred + looked_up)
    batch = shapes.bytes_of(batch_activations(arrays))
    return ChunkBytes(saved + batch, peak + batch, deferred, split_peak + batch)


def _pieces(
    shapes: ActivationShapes, part: _StackPart, logit_bytes: float, *, makes_source: bool
) -> list[_Piece]:
    """The pieces of a stack in forward order: what it received, embedding, layers, exit.

    makes_source: whether the chunk computes what cross attention reads. A decoder's chunk that does
    not receives it from another stage and saves it for the products of its layers.
    """
    pieces: list[_Piece] = []
    if part.has_cross_attention:
        source = shapes.bytes_of([hidden_saved(("batch", "seq"), "source")])
        pieces.append(_Piece(0.0 if makes_source else source, deferred=source))
    if part.entry is not None:
        tensors = entry_activations(shapes, part.seq, part.entry)
        pieces.append(_Piece(shapes.bytes_of(tensors)))
    shared = shapes.bytes_of(shared_activations(shapes, part.attentions))
    for at, (attentions, number) in enumerate(part.layers):
        layer = _layer(shapes, attentions)
        pieces.append(_Piece(*layer, number=number, shared=0.0 if at else shared))
    if part.exit is not None:
        end = exit_activations(part.seq, part.exit, has_logits=part.has_logits)
        temporary = loss_bytes(shapes, part.seq, logit_bytes) if part.has_logits else 0.0
        loss = _Piece(shapes.bytes_of(end), temporary, split_temporary=temporary)
        pieces.append(loss)
        for core in part.predicted:
            pieces += [_Piece(*_layer(shapes, (core,))), loss]
    return pieces


@lru_cache(maxsize=65536)
def _layer(shapes: ActivationShapes, attentions: tuple[AttentionOp, ...]) -> LayerBytes:
    layer = layer_activations(shapes, attentions)
    saved, again = shapes.bytes_of(layer.saved), shapes.bytes_of(layer.recomputed)
    is_whole = shapes.recompute == "full" or shapes.kernels == "half"
    rows: int = shapes.batch * getattr(shapes, attentions[0].queries)
    stream = rows * shapes.hidden * shapes.value
    own = stream / (shapes.tp if shapes.splits else 1)
    mlp = _bytes_of_part(shapes, layer.recomputed if is_whole else layer.saved, SavedPart.MLP)
    scores = _bytes_of_part(shapes, (*layer.saved, *layer.recomputed), SavedPart.SCORES)
    repeated = again - (own if shapes.input_parts == 1 else 0) if is_whole else 0.0
    inner, matrix = rows * shapes.ffn * shapes.value, matrix_bytes(shapes, shapes.ffn)
    gathers = 2 * stream if shapes.splits else 0.0
    product = product_bytes(shapes, x=inner, w=matrix, y=own) + gathers
    product += cast_bytes(shapes, x=inner, y=stream)
    around_mlp = own * (1 + shapes.dropout)
    if any(attention.is_cross for attention in attentions):
        around_mlp += shapes.batch * shapes.seq * shapes.hidden * shapes.value  # source's gradient
    gate = _gate_parts(shapes) * inner
    in_mlp = around_mlp + max(gate, product)
    in_mlp = max(in_mlp, own + _in_up(shapes, inner, matrix, stream))
    copies = 3 if shapes.kernels != "mpctl" else 2 if attentions[0].has_sample_mask else 1
    behind = (repeated or again) - mlp + own + scores * copies
    fetched = own / shapes.fetched_parts if shapes.fetched_parts else 0.0
    temporary = fetched + max(repeated + in_mlp, behind)
    of_mlp = _mlp_deferred(shapes, rows, own)
    # Deferred, the activation's result stays while its gradient is made, and of a row product the
    # gathered gradient.
    row = stream if shapes.splits else 0.0
    split_mlp = around_mlp + row + max(gate, 2 * inner)
    split_temporary = fetched + max(repeated + split_mlp, behind + of_mlp + row)
    deferred = of_mlp + _attentions_deferred(shapes, attentions, rows, own)
    return LayerBytes(saved, temporary, deferred, split_temporary)


def _gate_parts(shapes: ActivationShapes) -> int:
    """How many tensors of the activation's size the backward of a gated one takes: gradients of its
    result and of both parts in mpctl's kernel on CUDA, else two more; 0 without a gate."""
    if not shapes.is_gated:
        return 0
    return 3 if shapes.is_cuda and shapes.kernels == "mpctl" else 5


def _in_up(shapes: ActivationShapes, inner: int, matrix: int, stream: int) -> float:
    """Bytes in the backward of the MLP's first product, less what the rest of the MLP has freed;
    in 1d it takes less than the second one's."""
    if shapes.mode == "1d":
        return 0.0
    columns = 2 if shapes.is_gated else 1
    return product_bytes(shapes, x=stream, w=columns * matrix, y=columns * inner) - inner


def _bytes_of_part(
    shapes: ActivationShapes, tensors: Sequence[SavedTensor], part: SavedPart
) -> float:
    return shapes.bytes_of(tensor for tensor in tensors if tensor.part is part)


def _mlp_deferred(shapes: ActivationShapes, rows: int, own: float) -> float:
    """Inputs of the MLP's products and the gradients of their results, which dW needs."""
    gated = 2 if shapes.is_gated else 1
    columns = shapes.ffn + gated * shapes.ffn + shapes.hidden
    return shapes.deferred_input(own) + rows * columns * shapes.operand


def _attentions_deferred(
    shapes: ActivationShapes, attentions: Sequence[AttentionOp], rows: int, own: float
) -> float:
    """The same of the products around a layer's attentions."""
    total = 0.0
    for attention in attentions:
        keys = shapes.batch * getattr(shapes, attention.keys)
        columns = rows * (2 * shapes.inner + shapes.hidden) + keys * shapes.kv
        total += shapes.deferred_input(own) + columns * shapes.operand
    return total
