"""Activation memory of one micro batch in a model chunk: bytes saved until its backward, and the
peak of what its backward needs in addition.

The saved bytes are the sum of the tensors of plan/estimate/saved.py. The peak is found by going backward
through the chunk, from its exit to its entry: at each point the tensors of the later layers are
freed, and memory holds gradients of the hidden states, of a layer's products, of weights on their
way to the gradient buffer, and recomputed tensors. Where autograd sums the gradients of a tied word
table, the head's dW waits for the embedding's; mpctl's heads and lookups add to the gradient
itself, on a grid only lookups do.

By hand, gpt of one fp32 layer, rows r = bs, no dropout: at the end of the MLP's backward there are
the gradients of the hidden states r h and of its activation r f, and a matrix's h f, in addition to
all that was saved.

Letters: b batch, s sequence, h hidden, f MLP width, v vocabulary; t tp, c cp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from mpctl.model.families import batch_arrays
from mpctl.model.layout.job_layout import MAX_SENDS_IN_FLIGHT, JobLayout
from mpctl.model.operators.activation_shapes import ActivationShapes
from mpctl.model.operators.kernel_sets import COPIES_IN_FLIGHT
from mpctl.model.operators.layer import SOURCE, Activation, Loss, Operator, OperatorGroup
from mpctl.model.operators.matmul import Dims, MatMul, table_bytes
from mpctl.model.operators.table import StackPart, StageSlice
from mpctl.plan.estimate.saved import batch_activations, forward_activations, layer_activations, shared_activations


class Moment(NamedTuple):
    """`number` equal parts of a chunk in the order of backward. held: the most at once during the
    first of them; freed: what each leaves behind it. place: of the first of them, 0 before the
    chunk's first layer in the order of backward, n in its n-th, one more behind the last; is_first:
    it ends before the backward has made the gradient of a parameter."""

    held: float
    freed: float = 0.0
    number: int = 1
    place: int = 0
    is_first: bool = False


class ChunkBytes(NamedTuple):
    """Bytes of activations of one micro batch in one model chunk.

    saved: from its forward to its backward. peak: the most at once during its backward, `saved`
    included; moments: that of each of its parts. Zero-bubble schedules split the backward in two;
    deferred: held from its first part (gradients of inputs) until its second (gradients of
    weights). split_peak: the most at once during the first part; late: more than `deferred`
    during the second.
    """

    saved: float = 0.0
    peak: float = 0.0
    deferred: float = 0.0
    split_peak: float = 0.0
    late: float = 0.0
    moments: tuple[Moment, ...] = ()

    @property
    def temporary(self) -> float:
        """Bytes that a backward needs in addition to the saved ones."""
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


def stage_chunks(layout: JobLayout, stage: int, shapes: ActivationShapes) -> tuple[ChunkBytes, ...]:
    """Bytes of activations of one micro batch in each chunk of a stage; shapes: the layout's."""
    model = layout.model
    arrays = tuple(array.dims for array in batch_arrays(model, layout.job.data.chat).values())
    rest = arrays, model.tied_embeddings
    kinds, order = layout.table.once(("parts", layout.stage_classes[stage]), lambda: _kinds(layout.chunks(stage)))
    sizes = [_chunk(shapes, parts, *rest) for parts in kinds]
    return tuple([sizes[kind] if kinds[kind] else _handed_on(layout, stage, n, shapes) for n, kind in enumerate(order)])


def _handed_on(layout: JobLayout, stage: int, chunk: int, shapes: ActivationShapes) -> ChunkBytes:
    """A chunk that has nothing sends on what it receives, and holds it until its gradient has come. Messages of
    several tensors are as many times in flight (memory.py counts one)."""
    arrays = tuple(array.dims for array in batch_arrays(layout.model, layout.job.data.chat).values())
    tensors = len(layout.border(stage, chunk, after=True).dims) if layout.job.parallel.pipeline_layout else 0
    held = tensors * shapes.own_bytes() + shapes.bytes_of(batch_activations(arrays))
    peak = held + max(0, tensors - 1) * (MAX_SENDS_IN_FLIGHT + 1) * shapes.own_bytes()
    return ChunkBytes(held, peak, 0, peak, moments=(Moment(peak),))


def _kinds(chunks: Iterable[Iterable[StageSlice]]) -> tuple[tuple[tuple[StackPart, ...], ...], tuple[int, ...]]:
    """(different chunks, the number of its kind for each chunk)."""
    kinds: dict[tuple[StackPart, ...], int] = {}
    order = [kinds.setdefault(tuple(s.part for s in chunk), len(kinds)) for chunk in chunks]
    return tuple(kinds), tuple(order)


class _Piece(NamedTuple):
    """`number` equal parts of a chunk: bytes of each as a layer's; shared: bytes that all of them
    save together; is_layer: each is a layer of the stack. loss: the working block of a loss, which
    is freed before `temporary` is taken."""

    saved: float
    temporary: float = 0.0
    deferred: float = 0.0
    split_temporary: float = 0.0
    number: int = 1
    shared: float = 0.0
    is_layer: bool = False
    loss: float = 0.0

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
    shapes: ActivationShapes, parts: tuple[StackPart, ...], arrays: tuple[Dims, ...], is_tied: bool
) -> ChunkBytes:
    """The peak of a backward through the chunk, piece by piece from its exit."""
    pieces = [piece for part in parts for piece in _pieces(shapes, part)]
    saved, layers = sum(piece.total for piece in pieces), sum(piece.number for piece in pieces if piece.is_layer)
    has_both_ends = any(p.entry is not None for p in parts) and any(p.exit is not None for p in parts)
    is_summed = not shapes.kernels.adds_rows or shapes.mode != "1d"  # by autograd
    heads = [product for p in parts if p.exit is not None for product in p.exit.products if product.is_head]
    is_trained = not any(head.is_frozen for head in heads)
    waits = table_bytes(shapes) if is_tied and has_both_ends and is_summed and is_trained else 0.0
    batch = shapes.bytes_of(batch_activations(arrays))
    held, done, deferred = saved + batch, 0, 0.0
    split_peak, moments = held, [Moment(held)]
    for at, piece in enumerate(reversed(pieces)):
        if piece.loss:
            moments.append(Moment(held + piece.loss, place=done, is_first=not at))
        place = done + (piece.is_layer or done == layers)
        moments.append(Moment(held + piece.temporary, piece.saved, piece.number, place))
        split_peak = max(split_peak, held + deferred + piece.split_peak)
        held += (0.0 if at else waits) - piece.total
        done += piece.number * piece.is_layer
        deferred += piece.number * piece.deferred
    peak = max(moment.held for moment in moments)
    return ChunkBytes(saved + batch, peak, deferred, split_peak, moments=tuple(moments))


def _pieces(shapes: ActivationShapes, part: StackPart) -> Iterator[_Piece]:
    """The pieces of a stack in forward order: lookup, source, embedding, layers, exit. The source of
    cross attention, made in this chunk or received, is saved for the products of its layers; a chunk
    that makes it and has no such layer sends it on and keeps nothing."""
    lookup, embedding = None, None
    if part.entry is not None and part.entry.layers:  # multi-token prediction, apart from the loss
        yield from _exit_pieces(shapes, part.entry, part.seq)
    elif part.entry is not None:
        lookup, embedding = _entry_pieces(shapes, part.entry)
    if lookup is not None:  # after all that the chunk received has been freed
        yield lookup
    if part.has_cross_attention:
        source = shapes.own_bytes()
        yield _Piece(source, deferred=source)
    if embedding is not None:
        yield embedding
    shared = shapes.bytes_of(shared_activations(shapes, part.first)) if part.first else 0.0
    for at, (block, number) in enumerate(part.layers):
        of_all = 0.0 if at else shared
        yield _Piece(*layer_bytes(shapes, block), number=number, shared=of_all, is_layer=True)
    if part.exit is not None:
        yield from _exit_pieces(shapes, part.exit, part.seq)


@lru_cache(maxsize=4096)
def _entry_pieces(shapes: ActivationShapes, entry: OperatorGroup) -> tuple[_Piece, _Piece]:
    """The lookup, whose backward is the last, and what the embedding saves."""
    needed = max((one.needs(shapes) for one in entry.products), default=0.0)
    return _Piece(0.0, needed, split_temporary=needed), _Piece(shapes.bytes_of(forward_activations(shapes, entry.flat)))


@lru_cache(maxsize=4096)
def _exit_pieces(shapes: ActivationShapes, exit_: OperatorGroup, seq: str) -> tuple[_Piece, ...]:
    """An exit in forward order: the model's own head and, for each layer of multi-token prediction,
    the product that joins its inputs, the layer and its head."""
    pieces, end = list[_Piece](), list[Operator]()
    for operation in exit_.operations:
        if isinstance(operation, OperatorGroup):
            pieces += [_end_piece(shapes, end, seq), _Piece(*layer_bytes(shapes, operation))]
            end = []
        elif isinstance(operation, MatMul) and (operation.is_lookup or (operation.makes_logits and _has_loss(end))):
            pieces.append(_end_piece(shapes, end, seq))
            end = [operation]
        else:
            end.append(operation)
    return (*pieces, _end_piece(shapes, end, seq))


def _has_loss(operations: Iterable[Operator]) -> bool:
    return any(isinstance(one, Loss) for one in operations)


def _end_piece(shapes: ActivationShapes, operations: Sequence[Operator], seq: str) -> _Piece:
    """Operations of an exit, with a head and its loss or without. Inputs of the last layers are held at
    the loss until they are copied to the host, which the first layer that backward takes waits for."""
    losses = [one.needs(shapes) for one in operations if isinstance(one, Loss)]
    heads = [one.needs(shapes) for one in operations if isinstance(one, MatMul) and one.makes_logits]
    leaving = (
        COPIES_IN_FLIGHT * shapes.own_bytes(seq) / shapes.fetched_parts if losses and shapes.fetched_parts else 0.0
    )
    loss, temporary = (max(needs, default=0.0) + leaving for needs in (losses, heads))
    saved = shapes.bytes_of(forward_activations(shapes, operations))
    return _Piece(saved, temporary, split_temporary=max(loss, temporary), loss=loss)


def _needs(shapes: ActivationShapes, operation: Operator, own: float) -> tuple[float, float]:
    """Temporary bytes of an operation's backward, and where weights' gradients are deferred. Of an MLP in
    tiles they are a tile's, with the gradient of its input, `own` bytes, which the tiles fill."""
    dims = operation.reads if isinstance(operation, Activation) else ()
    if isinstance(operation, MatMul):
        dims = (*operation.reads, *operation.writes)
    if not shapes.tiles or "ffn" not in dims:
        return operation.needs(shapes), operation.needs(shapes, defers=True)
    tile = shapes.of_tile
    return own + operation.needs(tile), own + operation.needs(tile, defers=True)


@lru_cache(maxsize=65536)
def layer_bytes(shapes: ActivationShapes, block: OperatorGroup) -> LayerBytes:
    """One walk back over a layer's operations. What forward saved of a branch is freed at the
    branch's beginning; what is recomputed of it is there from its end on, or from the layer's end
    where the whole layer is recomputed."""
    layer, seq = layer_activations(shapes, block), block.stream[1]
    of_branch, again = defaultdict[int, float](float), defaultdict[int, float](float)
    for tensor in layer.recomputed:
        again[tensor.branch] += shapes.bytes_of([tensor])
    for tensor in () if shapes.recomputes_layers else layer.saved:
        of_branch[tensor.branch] += shapes.bytes_of([tensor])
    own = shapes.own_bytes(seq)
    held = own + (2 * own / shapes.fetched_parts if shapes.fetched_parts else 0.0)
    if any(core.is_cross for core in block.cores):
        held += shapes.stream_bytes()  # the gradient of the source
    if shapes.recomputes_layers:  # its input is there already
        held += sum(again.values()) - (own if shapes.input_parts == 1 else 0.0)
    elif shapes.recompute == "none":
        held -= shapes.kernels.spared_gradients * own
    waiting, most, split_most, deferred = {SOURCE}, 0.0, 0.0, 0.0
    branches = [list(branch) for _, branch in groupby(block.flat, key=lambda one: one.part)]
    waits = [sum(one.deferred(shapes, waiting) for one in branch if isinstance(one, MatMul)) for branch in branches]
    for number in range(len(branches), 0, -1):
        held += 0.0 if shapes.recomputes_layers else again[number]
        gone = 0.0
        for operation in reversed(branches[number - 1]):
            needs, split_needs = _needs(shapes, operation, own)
            most = max(most, held - gone + needs)
            split_most = max(split_most, held + deferred + split_needs)
            gone = operation.freed(shapes) if isinstance(operation, Activation) and not shapes.tiles else 0.0
        held -= of_branch[number] + again[number]
        deferred += waits[number - 1]
    saved = shapes.bytes_of(layer.saved)
    return LayerBytes(saved, most, deferred, split_most)
