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

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from mpctl.core.tensor_grid import FEATURES
from mpctl.model.families import get_family
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.kernel_sets import COPIES_IN_FLIGHT, ROWS_BLOCK, row_sums_bytes
from mpctl.model.operators.layer import SOURCE, Activation, Loss, Operation, OperatorGroup
from mpctl.model.operators.matmul import Dims, MatMul
from mpctl.model.operators.table import StackPart, StageSlice
from mpctl.plan.estimate.activation_shapes import ActivationShapes, SavedTensor
from mpctl.plan.estimate.saved import (
    batch_activations,
    forward_activations,
    layer_activations,
    saved_input,
    shared_activations,
)


class Moment(NamedTuple):
    """`number` equal parts of a chunk in the order of backward. held: the most at once during the
    first of them; freed: what each leaves behind it. is_layer: each is a layer of the stack;
    is_first: it ends before the backward has made the gradient of a parameter."""

    held: float
    freed: float = 0.0
    number: int = 1
    is_layer: bool = False
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
    rest = arrays, model.tied_embeddings, layout.profile.memory.logit_bytes
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
    shapes: ActivationShapes, parts: tuple[StackPart, ...], arrays: tuple[Dims, ...], is_tied: bool, logit_bytes: float
) -> ChunkBytes:
    """The peak of a backward through the chunk, piece by piece from its exit."""
    makes_source = any(part.exit is not None and not part.has_logits for part in parts)
    pieces = [_pieces(shapes, part, logit_bytes, makes_source=makes_source) for part in parts]
    saved = sum(piece.total for of_part in pieces for piece in of_part)
    has_both_ends = any(p.entry is not None for p in parts) and any(p.exit is not None for p in parts)
    is_summed = not shapes.kernels.adds_rows or shapes.mode != "1d"  # by autograd
    waits = table_bytes(shapes) if is_tied and has_both_ends and is_summed else 0.0
    remaining = split_peak = saved
    waiting = deferred = 0.0
    batch = shapes.bytes_of(batch_activations(arrays))
    moments = [Moment(saved + batch)]
    is_first = True
    for part, of_part in zip(reversed(parts), reversed(pieces), strict=True):
        for piece in reversed(of_part):
            if piece.loss:
                held = remaining + waiting + piece.loss + batch
                moments.append(Moment(held, is_first=is_first))
            held = remaining + waiting + piece.temporary + batch
            moments.append(Moment(held, piece.saved, piece.number, piece.is_layer))
            split_peak = max(split_peak, remaining + waiting + deferred + piece.split_peak)
            remaining -= piece.total
            is_first = False
            deferred += piece.number * piece.deferred
            waiting = waits
        if part.entry is not None:
            looked_up = lookup_bytes(shapes, part.seq)
            moments.append(Moment(remaining + waiting + looked_up + batch))
            split_peak = max(split_peak, remaining + waiting + deferred + looked_up)
    peak = max(moment.held for moment in moments)
    return ChunkBytes(saved + batch, peak, deferred, split_peak + batch, moments=tuple(moments))


def _pieces(shapes: ActivationShapes, part: StackPart, logit_bytes: float, *, makes_source: bool) -> list[_Piece]:
    """The pieces of a stack in forward order: what it received, embedding, layers, exit.

    makes_source: whether the chunk computes what cross attention reads. A decoder's chunk that does
    not receives it from another stage and saves it for the products of its layers.
    """
    pieces: list[_Piece] = []
    if part.has_cross_attention:
        source = shapes.bytes_of([SavedTensor("source", ("batch", "seq", "hidden"), is_outer=True)])
        pieces.append(_Piece(0.0 if makes_source else source, deferred=source))
    if part.entry is not None:
        pieces.append(_Piece(shapes.bytes_of(forward_activations(shapes, part.entry.flat)[0])))
    shared = shapes.bytes_of(shared_activations(shapes, part.first)) if part.first else 0.0
    for at, (block, number) in enumerate(part.layers):
        layer = _layer(shapes, block)
        of_all = 0.0 if at else shared
        pieces.append(_Piece(*layer, number=number, shared=of_all, is_layer=True))
    if part.exit is not None:
        pieces += _exit_pieces(shapes, part, part.exit, logit_bytes)
    return pieces


def _exit_pieces(
    shapes: ActivationShapes, part: StackPart, exit_: OperatorGroup, logit_bytes: float
) -> Iterator[_Piece]:
    """An exit in forward order: the model's own head and, for each layer of multi-token prediction,
    the product that joins its inputs, the layer and its head. The result of a stack without logits
    is the source of the next one."""
    parts: list[list[Operation]] = [[]]
    for operation in exit_.operations:
        is_layer = isinstance(operation, OperatorGroup)
        if is_layer or (isinstance(operation, MatMul) and operation.is_lookup):
            parts.append([])
        parts[-1].append(operation)
        if is_layer:
            parts.append([])
    for operations in parts:
        if isinstance(operations[0], OperatorGroup):
            yield _Piece(*_layer(shapes, operations[0]))
            continue
        tensors, _ = forward_activations(shapes, operations)
        loss = temporary = 0.0
        if any(isinstance(operation, Loss) for operation in operations):
            leaving = _leaving(shapes, part.seq)
            loss, temporary = (n + leaving for n in loss_bytes(shapes, part.seq, logit_bytes))
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
def _layer(shapes: ActivationShapes, block: OperatorGroup) -> LayerBytes:
    """A layer's bytes. Its backward can peak at two points: in its last branch, the MLP, and after
    that at the scores of its attentions."""
    layer, kernels = layer_activations(shapes, block), shapes.kernels
    saved, again = shapes.bytes_of(layer.saved), shapes.bytes_of(layer.recomputed)
    recomputes_all = shapes.recompute == "full" or kernels.keeps_second_products
    last = block.branches[-1]
    rows: int = shapes.batch * getattr(shapes, last.reads[1])
    stream = rows * shapes.hidden * shapes.value
    own = stream / (shapes.tp if shapes.splits else 1)
    of_last = [t for t in (layer.recomputed if recomputes_all else layer.saved) if t.part == last.part]
    mlp = shapes.bytes_of(of_last)
    scores = shapes.bytes_of(t for t in (*layer.saved, *layer.recomputed) if t.is_scores)
    repeated = 0.0
    if recomputes_all:
        repeated = again - (own if shapes.input_parts == 1 else 0)
    elif shapes.modules:  # those of the MLP, and after it those of attention
        repeated = shapes.bytes_of(t for t in layer.recomputed if t.part == last.part)
        again -= repeated
    activation = max(
        (one for one in block.flat if isinstance(one, Activation)),
        key=lambda one: prod(getattr(shapes, dim) for dim in one.reads),
    )  # of the experts or of the shared ones
    features: int = getattr(shapes, activation.reads[-1])
    inner, matrix = rows * features * shapes.value, matrix_bytes(shapes, features)
    if is_routed := activation.reads[0] == "routed":
        inner = shapes.routed * features * shapes.value
        matrix *= shapes.local_experts
    columns = 2 if activation.is_gated else 1
    made = 0 if shapes.adds_products and not is_routed else matrix
    product = product_bytes(shapes, x=inner, w=made, y=own)
    if shapes.splits:  # the second product gathers dY; the first X, and dX is summed
        arriving = 2 * stream + (own if shapes.keeps_shards else 0.0)
        first = columns * (inner + made) - (1 + columns) * inner  # what the activation read is gone
        product = product + arriving if is_routed else max(product + stream, first + arriving)
    product += cast_bytes(shapes, x=inner, y=stream)
    around_mlp = own * (1 + shapes.dropout)
    if any(core.is_cross for core in block.cores):
        around_mlp += shapes.batch * shapes.seq * shapes.hidden * shapes.value  # source's gradient
    gate = _gate_parts(shapes) * inner if activation.is_gated else 0
    in_mlp = around_mlp + max(gate, product)
    if shapes.mode != "1d":  # on a grid the first product may take more than the second
        up = product_bytes(shapes, x=stream, w=columns * matrix, y=columns * inner) - inner
        in_mlp = max(in_mlp, own + up)
    copies = kernels.score_copies[not block.cores[0].has_sample_mask]
    behind = ((repeated if recomputes_all else 0.0) or again) - mlp + own + scores * copies
    # The layer's own input, which `saved` leaves out, and that of the next one, fetched ahead.
    fetched = 2 * own / shapes.fetched_parts if shapes.fetched_parts else 0.0
    temporary = fetched + max(repeated + in_mlp, behind)
    # Deferred, the activation's result stays while its gradient is made, and of a row product the
    # gathered gradient.
    deferred = _deferred(shapes, block)
    of_mlp = sum(deferred.get(p.name, 0.0) for p in block.products if p.part == last.part)
    row = stream if shapes.splits else 0.0
    split_mlp = around_mlp + row + max(gate, 2 * inner)
    split_temporary = fetched + max(repeated + split_mlp, behind + of_mlp + row)
    return LayerBytes(saved, temporary, sum(deferred.values()), split_temporary)


def _gate_parts(shapes: ActivationShapes) -> int:
    """How many tensors of the activation's size the backward of a gated one takes: gradients of its
    result and of both parts in one kernel, else two more."""
    return shapes.kernels.gate_gradients if shapes.is_cuda else 5


def _deferred(shapes: ActivationShapes, block: OperatorGroup) -> dict[str, float]:
    """By product, bytes of its input and of the gradient of its result, which wait for a deferred
    dW. An input of several products waits once, cross attention's source once a chunk."""
    waiting, found = {SOURCE}, dict[str, float]()
    for product in block.products:
        if product.is_wide:  # computed at once
            continue
        own = 0.0 if product.value in waiting else shapes.bytes_of([saved_input(shapes, product)])
        waiting.add(product.value)
        found[product.name] = own + _gradient_bytes(shapes, product)
    return found


def _gradient_bytes(shapes: ActivationShapes, product: MatMul) -> float:
    """Bytes of the gradient of a product's result, under sequence parallelism gathered."""
    rows: int = prod(getattr(shapes, dim) for dim in product.rows)
    columns, is_latent = 1, product.writes[-1] == "latent"
    for dim, size in zip(product.matrix.dims, product.matrix.shape, strict=True):
        if dim in product.reads or (dim == "experts" and product.is_grouped):
            continue
        sizes = {"hidden": shapes.hidden, "expert_ffn": shapes.expert_ffn}
        columns *= sizes.get(dim, size // (shapes.feature_parts if dim in FEATURES else 1))
    return rows * columns * shapes.operand / (shapes.tp if shapes.splits and is_latent else 1)


# ------------------------------------------------------------------------------
# Temporary bytes of the backward of one matrix product, in every tensor mode.
#
# In addition to dY of y bytes, with x and w the bytes of a rank's parts of X and W:
#
#     1d         dX and dW                                   x + w
#     2d, 2.5d   b buffers for blocks that arrive, and p partial sums: one being made, one being
#                sent, this rank's own (train/layers/grid/products.py)
#                max(b w + p x, x + b x + p w)               b = min(q - 1, 2), p = min(q, 3)
#     3d         gathered dY and X, partial dX and dW, dX and dW (train/layers/grid/products.py)
#                l (y + 2 x + w) + x + w
#
# In 3d dW is laid out in blocks where partial dX has gone; a transport that still holds partial dX
# then takes l w more. For a head's logits 2d and 2.5d swap the roles: their gradient arrives in
# blocks, and dX stays, b y + b w + x + p w. The gradient of a lookup is gathered over the ranks
# that share it, copied without the words of other ranks, and then the table's gradient is computed.
#
# By hand, 2d with q = 2, x 8 bytes, w 4: max(4 + 16, 8 + 8 + 8) = 24 bytes, and 12 in 1d.


MOST_BUFFERS, MOST_SUMS = 2, 3


def product_bytes(shapes: ActivationShapes, *, x: float, w: float, y: float) -> float:
    """Temporary bytes of the backward of Y = X W; x, w, y: bytes of this rank's parts."""
    if shapes.mode == "1d":
        return x + w
    side = shapes.side
    if shapes.mode == "3d":
        return side * (y + 2 * x + w) + x + w
    buffers, sums = min(side - 1, MOST_BUFFERS), min(side, MOST_SUMS)
    return max(buffers * w + sums * x, x + buffers * x + sums * w)


def cast_bytes(shapes: ActivationShapes, *, x: float, y: float) -> float:
    """Temporary bytes of the same backward in fp8 with mpctl's kernels: dY is cast twice, once
    transposed, and a CPU multiplies 16-bit copies of the cast operands. x, y: bytes of X and dY in
    16 bit."""
    if not shapes.kernels.casts or shapes.operand == shapes.value:
        return 0.0
    return y if shapes.is_cuda else x + 2 * y


def head_bytes(shapes: ActivationShapes, *, x: float, w: float, y: float) -> float:
    """The same of an output head on a grid, Y its logits and W its table."""
    if shapes.mode == "3d":
        return product_bytes(shapes, x=x, w=w, y=y)
    buffers, sums = min(shapes.side - 1, MOST_BUFFERS), min(shapes.side, MOST_SUMS)
    return buffers * (y + w) + x + sums * w


def matrix_bytes(shapes: ActivationShapes, features: int) -> int:
    """Bytes of this rank's part of a matrix between the hidden states and `features` features of
    the rank."""
    parts = shapes.side if shapes.mode == "3d" else 1  # a third axis cuts the matrix as well
    return shapes.hidden * features * shapes.value // parts


def table_bytes(shapes: ActivationShapes) -> int:
    """Bytes of this rank's part of the word table."""
    return shapes.hidden * shapes.table_rows * shapes.value


def lookup_bytes(shapes: ActivationShapes, seq: str) -> float:
    """Temporary bytes of the backward of a lookup in the word table: the table's gradient, or the
    sums that are added to it (train/kernels/rows.py)."""
    rows: int = shapes.looked_up * getattr(shapes, seq)
    made: float = table_bytes(shapes)
    if shapes.kernels.adds_rows:
        vectors = rows * shapes.hidden
        sums = row_sums_bytes(vectors, width=shapes.value, wide=shapes.sums)
        converted = 0 if shapes.sums == shapes.value else min(vectors, ROWS_BLOCK) * shapes.sums
        made = min(made, sums) if shapes.is_cuda else converted
    if shapes.mode == "1d":
        return made
    given = rows * shapes.hidden * shapes.value
    return given + max(given, made)


# ------------------------------------------------------------------------------
# Bytes that a loss takes at the exit of a stack in addition to the saved ones.
#
# On a CPU the three passes over the logits work on blocks of rows in 32 bits; CUDA's kernels
# (train/kernels/triton/cross_entropy.py) hold a row's block in registers. The gradient is written over
# the logits either way.
#
# By hand, bf16 logits of 2 words a token and 4 tokens fit a CPU's block: 8 floats, 32 bytes.


LOSS_BLOCK = 1 << 17  # elements of a loss's working block on a CPU; CUDA's kernels have none


def loss_bytes(shapes: ActivationShapes, seq: str, logit_bytes: float) -> tuple[float, float]:
    """(the loss's working block, after that the gradients of the head's input and of its table, if
    that is made)."""
    rows: int = shapes.batch * getattr(shapes, seq)
    logits, stream = rows * shapes.vocab, rows * shapes.hidden * shapes.value
    if shapes.kernels.loss == "logits":
        return 0.0, logits * logit_bytes + stream
    block = max(shapes.vocab, LOSS_BLOCK // shapes.vocab * shapes.vocab)
    working = 0 if shapes.is_cuda else shapes.wide * (logits if logits <= block else 2 * block)
    table = table_bytes(shapes) if shapes.makes_table_gradient else 0
    if shapes.mode != "1d":
        return working, head_bytes(shapes, x=stream, w=table, y=logits * shapes.value)
    gathers = 2 * stream if shapes.splits else 0.0
    gathers += stream / shapes.tp if shapes.keeps_shards else 0.0
    return working, stream + gathers + table
