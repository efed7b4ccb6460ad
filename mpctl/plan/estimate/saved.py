"""The tensors that forward saves for backward: a fold over the operations of a layer or an end.

Each operation saves what its backward reads, unless an operation before it saved the same tensor: a
product its input, a norm its input and the statistics of each row, an activation its input, a core
queries, keys, values and result (attention.py), dropout a mask of a byte an element. Residual sums
and biases save nothing. A tensor outside the tensor-parallel regions is unsharded on every rank of
tp; under sequence parallelism each rank has its positions of it. A kernel set that differs has this
in its row (model/operators/kernel_sets.py).

By hand, one layer of b 1, s 2, h 4, fp32, no dropout, flash: 4 x 2 x 4 elements of norms and their
results, 4 of q k v and context, 8 of the MLP: 16 x 8 x 4 = 512 bytes, and some of statistics. For
16-bit elements Korthikanti et al. count, in bytes per sbh, norms 4, their results 4, q k v and
context 8, MLP 16, masks 2, and scores 5as/h (arXiv 2205.05198, section 4.1).

Letters: b batch, s sequence, h hidden, a heads, d head size, f MLP width; t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpctl.model.operators.activation_shapes import ActivationShapes, Dims, Saved, SavedTensor
from mpctl.model.operators.layer import CHOICE, SOURCE, Operator, OperatorGroup

TILED = "mlp"  # the module that training.tiled_mlp computes in tiles, of which it saves only the input


class LayerActivations(NamedTuple):
    """saved: held from forward to backward. recomputed: computed again for the backward by a second
    forward of the layer or of its attention."""

    saved: Sequence[SavedTensor]
    recomputed: Sequence[SavedTensor] = ()


def layer_activations(shapes: ActivationShapes, block: OperatorGroup) -> LayerActivations:
    """The activations of one layer."""
    tensors = forward_activations(shapes, block.flat)
    if shapes.tiles:  # of which backward makes one at a time again
        tensors = [one._replace(times=one.times / shapes.tiles) if one.module == TILED else one for one in tensors]
    if shapes.recomputes_layers:
        rows = block.stream[:-1]
        if shapes.recompute != "full":
            return LayerActivations(_second_products(rows), tensors)
        parts = 1 / shapes.input_parts if shapes.input_parts else 0
        layer_input = SavedTensor("input", (*rows, "hidden"), times=parts, is_outer=True)
        chosen = [one._replace(name="first choice", times=one.times / 2) for one in tensors if one.name == CHOICE]
        return LayerActivations((layer_input, *chosen), tensors)  # of choices in 4 bytes each
    modules = shapes.modules | ({TILED} if shapes.tiles else set())
    again = [one for one in tensors if one.is_formed or one.module in modules]
    return LayerActivations([one for one in tensors if one not in again], again)


def forward_activations(shapes: ActivationShapes, operations: Iterable[Operator]) -> Saved:
    """The tensors that operations save, in execution order, those that selective recomputation forms
    again included; a stack's source is saved by the chunk that has it, not by each layer."""
    kept, saved, branch, part = {SOURCE}, Saved(), 0, ""
    for operation in operations:
        branch, part = branch + (operation.part != part), operation.part
        saved += [tensor._replace(branch=branch) for tensor in operation.saved(shapes, kept)]
    return saved


def _second_products(rows: Dims) -> Saved:
    """Products 1, 3, 5, .. of q, k, v, output, gate, up, down, with the layer's input and the
    attention's result."""
    return [
        SavedTensor("input", (*rows, "hidden"), is_outer=True),
        SavedTensor("context", (*rows, "inner")),
        SavedTensor("queries", (*rows, "inner")),
        SavedTensor("values", (*rows, "kv"), times=0.5),
        SavedTensor("gate", (*rows, "ffn")),
        SavedTensor("down", (*rows, "hidden"), is_outer=True),
    ]


def shared_activations(shapes: ActivationShapes, block: OperatorGroup) -> Saved:
    """Tensors that all layers of a stack on one rank share: a mask per sample, which recomputed
    layers read again; a learned bias and the buckets that index it."""
    if not shapes.kernels.shares_masks or not block.cores:
        return []
    core = block.cores[0]
    pairs, tensors = (core.queries, core.keys, "cp"), Saved()
    is_shared = shapes.recompute != "none" or shapes.fuses_variants
    if core.has_sample_mask and is_shared:
        tensors.append(SavedTensor("mask", ("batch", *pairs), "mask"))
    if core.has_bias:
        tensors.append(SavedTensor("places", pairs, "index"))
        if shapes.is_cuda or shapes.recompute != "none":
            tensors.append(SavedTensor("bias", ("heads", *pairs)))
    return tensors


def batch_activations(arrays: Iterable[Dims]) -> Saved:
    """The arrays of a batch with these dimensions, 8 bytes an element; every rank of tp holds those
    of all samples. Arrays with one number per sample are negligible and left out."""
    return [
        SavedTensor("batch", tuple("micro_batch" if d == "batch" else d for d in dims), "index")
        for dims in arrays
        if len(dims) > 1
    ]
