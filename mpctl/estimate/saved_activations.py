"""What the forward of a layer, an end of a stack or a batch saves for the backward.

The third reading of the operator table, beside its matrix products and its parameters. The inputs
of a product, of a norm and of an activation are saved; a dropout mask takes a byte an element; a
residual sum and a bias save nothing. Tensors outside the tensor-parallel regions are whole on every
rank of tp, but under sequence parallelism each rank has its own positions of them.

Kernels `mpctl` are this project's as a rehearsal measures them (runtime/memory.py).
`megatron` is Korthikanti et al., arXiv 2205.05198, section 4.1, in bytes of 16 bit, units of sbh:
norms 4, their results 4, q k v and context 8, MLP 16, masks 2, and scores 5as/h; without scores in
memory Transformer Engine's fused kernels, which keep a product's operand in 8 bits where it is
multiplied so. `eager` is the same with a gated activation of two kernels, the first of which saves
its result as well. `half` is torchtitan's selective recomputation: of a layer its input, the
attention's result and every second product's.

By hand, one layer of b 1, s 2, h 4, fp32, no dropout, flash: 4 x 2 x 4 elements of norms and their
results, 4 of q k v and context, 8 of the MLP: 16 x 8 x 4 = 512 bytes, and some of statistics.

Letters: b batch, s sequence, h hidden, a heads, d head size, f MLP width; t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mpctl.estimate.activation_shapes import ActivationShapes
from mpctl.estimate.saved_attention import attention_saved
from mpctl.operators.matmul import AttentionOp, Dims
from mpctl.operators.saved import SavedPart, SavedTensor, Width, hidden_saved, norm_saved

LOSS_FLOATS = 4  # of each token: its loss, the softmax's maximum and sum, the target's logit


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """saved: held from forward to backward. recomputed: formed again for the backward by a second
    forward of the layer or of its attention."""

    saved: tuple[SavedTensor, ...]
    recomputed: tuple[SavedTensor, ...] = ()


def layer_activations(
    shapes: ActivationShapes, attentions: Sequence[AttentionOp]
) -> LayerActivations:
    """The activations of a layer with these attentions, the first of which is over the layer's own
    hidden states, and an MLP."""
    rows = ("batch", attentions[0].queries)
    saved: list[SavedTensor] = []
    recomputed: list[SavedTensor] = []
    if shapes.operand < shapes.value:  # the context as a product's operand, beside attention's own
        saved.append(SavedTensor("context operand", (*rows, "inner"), "operand"))
    for attention in attentions:
        saved += _branch(shapes, ("batch", attention.queries), attention.part)
        own, again = attention_saved(shapes, attention)
        saved += own
        recomputed += again
    saved += _branch(shapes, rows, "mlp", SavedPart.MLP)
    saved += _mlp(shapes, rows)
    if shapes.recompute == "full":
        parts = 1 / shapes.input_parts if shapes.input_parts else 0
        hidden = SavedTensor("input", (*rows, "hidden"), times=parts, is_outer=True)
        return LayerActivations((hidden,), tuple(saved + recomputed))
    if shapes.recompute == "selective" and shapes.kernels == "half":
        return LayerActivations(tuple(_every_second(rows)), tuple(saved + recomputed))
    return LayerActivations(tuple(saved), tuple(recomputed))


def _branch(
    shapes: ActivationShapes, rows: Dims, name: str, part: SavedPart = SavedPart.OTHER
) -> Iterator[SavedTensor]:
    """What a residual branch saves: its norms, its input and the dropout mask of its result. A
    second branch that reads the input of the first (parallel residual) has that saved already."""
    is_second = shapes.is_parallel and part is SavedPart.MLP
    is_again = is_second and shapes.shares_norm
    if not is_again:
        norms = list(norm_saved(shapes.norm, rows, f"{name} norm", part))
        yield from norms[1:] if is_second else norms
    if not is_again or shapes.casts_inputs:
        width: Width = "value" if shapes.keeps_shards else "operand"
        yield SavedTensor(f"{name} input", (*rows, "hidden"), width, is_outer=True, part=part)
    if shapes.norm_order == "sandwich":
        yield from norm_saved(shapes.norm, rows, f"{name} output norm", part)
    if shapes.dropout:
        yield SavedTensor(f"{name} mask", (*rows, "hidden"), "mask", is_outer=True, part=part)


def _mlp(shapes: ActivationShapes, rows: Dims) -> Iterator[SavedTensor]:
    """The activation's input and result; mpctl's relu finds its gradient in the result alone, which
    a product in fp8 keeps another copy of."""
    part = SavedPart.MLP
    if shapes.is_gated or shapes.activation != "relu" or shapes.kernels != "mpctl":
        yield SavedTensor("mlp up", (*rows, "ffn"), times=2 if shapes.is_gated else 1, part=part)
    elif shapes.operand < shapes.value:
        yield SavedTensor("mlp result", (*rows, "ffn"), part=part)
    if shapes.is_gated and shapes.kernels == "eager":
        yield SavedTensor("mlp gate", (*rows, "ffn"), part=part)
    yield SavedTensor("mlp activation", (*rows, "ffn"), "operand", part=part)


def _every_second(rows: Dims) -> Iterator[SavedTensor]:
    """Products 1, 3, 5, .. of q, k, v, output, gate, up, down, with the layer's input and the
    attention's result, which both are saved beside them."""
    yield hidden_saved(rows, "input")
    yield SavedTensor("context", (*rows, "inner"))
    yield SavedTensor("queries", (*rows, "inner"))
    yield SavedTensor("values", (*rows, "kv"), times=0.5)
    yield SavedTensor("gate", (*rows, "ffn"))
    yield hidden_saved(rows, "down")


def shared_activations(
    shapes: ActivationShapes, attentions: Sequence[AttentionOp]
) -> tuple[SavedTensor, ...]:
    """What all layers of a stack on one rank save together: a mask per sample, which recomputed
    layers are given again; a learned bias and the buckets that it is looked up by."""
    attention, (seq, keys) = attentions[0], (attentions[0].queries, attentions[0].keys)
    if shapes.kernels != "mpctl":
        return ()
    tensors: list[SavedTensor] = []
    is_shared = shapes.recompute != "none" or shapes.fuses_variants
    if attention.has_sample_mask and is_shared:
        tensors.append(SavedTensor("mask", ("batch", seq, keys, "cp"), "mask"))
    if attention.has_bias:
        tensors.append(SavedTensor("places", (seq, keys, "cp"), "index"))
        if shapes.is_cuda or shapes.recompute != "none":
            tensors.append(SavedTensor("bias", ("heads", seq, keys, "cp")))
    return tuple(tensors)


def entry_activations(
    shapes: ActivationShapes, seq: str, saved: Iterable[SavedTensor]
) -> tuple[SavedTensor, ...]:
    """An embedding's activations: the ids that were looked up, the dropout mask, and what the
    family adds (`saved`)."""
    rows = ("batch", seq)
    words = SavedTensor("words", ("looked_up", seq), "index", 1 if shapes.tp > 1 else 0)
    mask = SavedTensor("embedding mask", (*rows, "hidden"), "mask", is_outer=True)
    return (words, *(mask,) * shapes.dropout, *saved)


def exit_activations(
    seq: str, saved: Iterable[SavedTensor], *, has_logits: bool
) -> tuple[SavedTensor, ...]:
    """What is saved behind the last layer of a stack: the family's tensors (`saved`) and, where the
    exit gives logits, these and the loss."""
    if not has_logits:
        return tuple(saved)
    rows = ("batch", seq)
    loss = SavedTensor("loss", rows, "float", LOSS_FLOATS)
    return (*saved, SavedTensor("logits", (*rows, "vocab")), loss)


def batch_activations(arrays: Iterable[Dims]) -> tuple[SavedTensor, ...]:
    """The arrays of a batch with these dimensions, 8 bytes an element; every rank of tp is given
    those of all samples. Those of one number a sample take nothing to speak of and are left out."""
    return tuple(
        SavedTensor("batch", tuple("micro_batch" if d == "batch" else d for d in dims), "index")
        for dims in arrays
        if len(dims) > 1
    )
