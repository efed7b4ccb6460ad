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
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from mpctl.model.families import get_family
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.activation_shapes import ActivationShapes, SavedTensor
from mpctl.model.operators.kernel_sets import COPIES_IN_FLIGHT
from mpctl.model.operators.layer import SOURCE, Activation, Loss, Operator, OperatorGroup, loss_bytes
from mpctl.model.operators.matmul import Dims, MatMul, lookup_bytes, table_bytes
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
    arrays = tuple(array.dims for array in get_family(model.family).batch_arrays.values())
    rest = arrays, model.tied_embeddings
    kinds, order = layout.table.once(("parts", layout.stage_classes[stage]), lambda: _kinds(layout.chunks(stage)))
    sizes = [_chunk(shapes, parts, *rest) for parts in kinds]
    return tuple([sizes[kind] for kind in order])


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
    makes_source = any(part.exit is not None and not part.has_logits for part in parts)
    pieces = [_pieces(shapes, part, makes_source=makes_source) for part in parts]
    saved = sum(piece.total for of_part in pieces for piece in of_part)
    has_both_ends = any(p.entry is not None for p in parts) and any(p.exit is not None for p in parts)
    is_summed = not shapes.kernels.adds_rows or shapes.mode != "1d"  # by autograd
    waits = table_bytes(shapes) if is_tied and has_both_ends and is_summed else 0.0
    remaining = split_peak = saved
    waiting = deferred = 0.0
    layers = sum(piece.number for of_part in pieces for piece in of_part if piece.is_layer)
    done = 0
    batch = shapes.bytes_of(batch_activations(arrays))
    moments = [Moment(saved + batch)]
    is_first = True
    for part, of_part in zip(reversed(parts), reversed(pieces), strict=True):
        for piece in reversed(of_part):
            if piece.loss:
                moments.append(Moment(remaining + waiting + piece.loss + batch, place=done, is_first=is_first))
            place = done + (piece.is_layer or done == layers)
            done += piece.number * piece.is_layer
            moments.append(Moment(remaining + waiting + piece.temporary + batch, piece.saved, piece.number, place))
            split_peak = max(split_peak, remaining + waiting + deferred + piece.split_peak)
            remaining -= piece.total
            is_first = False
            deferred += piece.number * piece.deferred
            waiting = waits
        if part.entry is not None:
            looked_up = lookup_bytes(shapes, part.seq)
            moments.append(Moment(remaining + waiting + looked_up + batch, place=done + (done == layers)))
            split_peak = max(split_peak, remaining + waiting + deferred + looked_up)
    peak = max(moment.held for moment in moments)
    return ChunkBytes(saved + batch, peak, deferred, split_peak + batch, moments=tuple(moments))


def _pieces(shapes: ActivationShapes, part: StackPart, *, makes_source: bool) -> list[_Piece]:
    """The pieces of a stack in forward order: what it received, embedding, layers, exit.

    makes_source: whether the chunk computes what cross attention reads. A decoder's chunk that does
    not receives it from another stage and saves it for the products of its layers.
    """
    pieces: list[_Piece] = []
    if part.has_cross_attention:
        source = shapes.bytes_of([SavedTensor("source", ("batch", "seq", "hidden"), is_outer=True)])
        pieces.append(_Piece(0.0 if makes_source else source, deferred=source))
    if part.entry is not None:
        pieces.append(_Piece(shapes.bytes_of(forward_activations(shapes, part.entry.flat))))
    shared = shapes.bytes_of(shared_activations(shapes, part.first)) if part.first else 0.0
    for at, (block, number) in enumerate(part.layers):
        layer = layer_bytes(shapes, block)
        of_all = 0.0 if at else shared
        pieces.append(_Piece(*layer, number=number, shared=of_all, is_layer=True))
    if part.exit is not None:
        pieces += _exit_pieces(shapes, part, part.exit)
    return pieces


def _exit_pieces(shapes: ActivationShapes, part: StackPart, exit_: OperatorGroup) -> Iterator[_Piece]:
    """An exit in forward order: the model's own head and, for each layer of multi-token prediction,
    the product that joins its inputs, the layer and its head. The result of a stack without logits
    is the source of the next one."""
    ends: list[OperatorGroup | list[Operator]] = [[]]
    for operation in exit_.operations:
        if isinstance(operation, OperatorGroup):
            ends += [operation, []]
            continue
        if isinstance(operation, MatMul) and operation.is_lookup:
            ends.append([])
        end = ends[-1]
        assert isinstance(end, list)
        end.append(operation)
    for end in ends:
        if isinstance(end, OperatorGroup):
            yield _Piece(*layer_bytes(shapes, end))
            continue
        tensors = forward_activations(shapes, end)
        loss = temporary = 0.0
        if any(isinstance(operation, Loss) for operation in end):
            leaving = _leaving(shapes, part.seq)
            loss, temporary = (n + leaving for n in loss_bytes(shapes, part.seq))
        elif not part.has_logits:
            tensors.append(SavedTensor("result", ("batch", part.seq, "hidden"), is_outer=True))
        most = max(loss, temporary)
        yield _Piece(shapes.bytes_of(tensors), temporary, split_temporary=most, loss=loss)


def _leaving(shapes: ActivationShapes, seq: str) -> float:
    """Inputs that are held at the loss until they are copied to the host: the last ones. The first
    layer that backward takes waits for their copies."""
    if not shapes.fetched_parts:
        return 0.0
    hidden = SavedTensor("input", ("batch", seq, "hidden"), is_outer=True)
    return COPIES_IN_FLIGHT * shapes.bytes_of([hidden]) / shapes.fetched_parts


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
    waiting, most, split_most, deferred = {SOURCE}, 0.0, 0.0, 0.0
    branches = [list(branch) for _, branch in groupby(block.flat, key=lambda one: one.part)]
    waits = [sum(one.deferred(shapes, waiting) for one in branch if isinstance(one, MatMul)) for branch in branches]
    for number in range(len(branches), 0, -1):
        held += 0.0 if shapes.recomputes_layers else again[number]
        gone = 0.0
        for operation in reversed(branches[number - 1]):
            most = max(most, held - gone + operation.needs(shapes))
            split_most = max(split_most, held + deferred + operation.needs(shapes, defers=True))
            gone = operation.freed(shapes) if isinstance(operation, Activation) else 0.0
        held -= of_branch[number] + again[number]
        deferred += waits[number - 1]
    saved = shapes.bytes_of(layer.saved)
    return LayerBytes(saved, most, deferred, split_most)
