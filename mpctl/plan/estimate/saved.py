"""The tensors that forward saves for backward: a fold over the operations of a layer or an end.

Each operation saves what its backward reads, unless an operation before it saved the same tensor: a
product its input, a norm its input and the statistics of each row, an activation its input, a core
queries, keys, values and result (SavedByCore), dropout a mask of a byte an element. Residual sums
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

from mpctl.model.operators.layer import (
    CONTEXT,
    SOURCE,
    Activation,
    AttentionOp,
    Combine,
    Dispatch,
    Dropout,
    Loss,
    Norm,
    Operation,
    OperatorGroup,
    Residual,
)
from mpctl.model.operators.matmul import Dims, MatMul
from mpctl.plan.estimate.activation_shapes import ActivationShapes, SavedTensor, Width, is_outer
from mpctl.plan.estimate.saved_attention import Saved, saved_by_core

KEY_LATENT = "attention.key_value_latent_norm"
LATENTS = {
    "attention.query_down": "query_latent",
    "attention.query_latent_norm": "query_latent",
    "attention.key_value_down": "key_columns",
    KEY_LATENT: "key_latent",
}
"""The columns of each tensor of latents (ActivationShapes)."""
MADE_OF_LATENTS = frozenset(
    {
        "queries",
        "keys",
        "values",
        "attention.query_up input",
        "attention.key_value_up input",
        "attention.query_latent_norm statistics",
        "attention.key_value_latent_norm statistics",
    }
)
"""Tensors that follow from the results of the products of the latents."""
LOSS_FLOATS = 4  # of each token: its loss, the softmax's maximum and sum, the target's logit


class LayerActivations(NamedTuple):
    """saved: held from forward to backward. recomputed: computed again for the backward by a second
    forward of the layer or of its attention."""

    saved: Sequence[SavedTensor]
    recomputed: Sequence[SavedTensor] = ()


def layer_activations(shapes: ActivationShapes, block: OperatorGroup) -> LayerActivations:
    """The activations of one layer."""
    saved, again = forward_activations(shapes, block.operations)
    rows = block.branches[0].reads[:-1]
    if shapes.recompute == "full":
        parts = 1 / shapes.input_parts if shapes.input_parts else 0
        layer_input = SavedTensor("input", (*rows, "hidden"), times=parts, is_outer=True)
        chosen = [
            tensor._replace(name="first choice", times=tensor.times / 2) for tensor in saved if tensor.name == CHOICE
        ]  # in 4 bytes each
        return LayerActivations((layer_input, *chosen), saved + again)
    if shapes.recompute == "selective" and shapes.kernels.keeps_second_products:
        return LayerActivations(_second_products(rows), saved + again)
    dropped = [tensor for tensor in saved if _is_of_module(shapes, block, tensor)]
    kept = [tensor for tensor in saved if tensor not in dropped]
    return LayerActivations(kept, again + dropped)


def _is_of_module(shapes: ActivationShapes, block: OperatorGroup, tensor: SavedTensor) -> bool:
    """Whether a module that selective recomputation repeats makes the tensor, in other kernel sets
    than ours: Megatron's --recompute-modules."""
    modules, name = shapes.modules, tensor.name
    if not modules:
        return False
    norms = {norm.name for norm in block.norms}
    normed = {f"{product.name} input" for product in block.products if product.value in norms}
    has_latents = any(core.latent for core in block.cores)
    is_made = {
        "mla_up_proj": has_latents and name in MADE_OF_LATENTS,
        "moe_act": name == "mlp.experts.down input",
        "shared_experts": "shared_ffn" in tensor.dims,
        "layernorm": name in normed,
        "mlp": "ffn" in tensor.dims,
    }
    return any(is_made.get(module, False) for module in modules)


def forward_activations(shapes: ActivationShapes, operations: Iterable[Operation]) -> tuple[Saved, Saved]:
    """The tensors that operations save, in execution order, and those that selective recomputation
    recomputes; a stack's source is saved by the chunk that has it, not by each layer."""
    kept, saved, again = {SOURCE}, Saved(), Saved()
    for operation in operations:
        if isinstance(operation, AttentionOp):
            tensors, formed = saved_by_core(shapes, operation)
            saved += [tensor._replace(part=operation.part) for tensor in tensors]
            again += [tensor._replace(part=operation.part) for tensor in formed]
            kept.add(CONTEXT)
        elif isinstance(operation, MatMul):
            saved += _product_input(shapes, operation, kept)
            saved += _shared_gate(shapes, operation)
            kept.add(operation.value)
        elif isinstance(operation, Norm):
            saved += _norm(operation, kept)
            kept.add(operation.value)
        elif isinstance(operation, Activation):
            saved += _activation(shapes, operation)
        elif isinstance(operation, Dispatch):
            saved += _routing(shapes, operation)
        elif isinstance(operation, Combine):
            saved += _combined(shapes, operation)
        elif isinstance(operation, Residual | Dropout) and shapes.dropout:
            name = f"{operation.part} mask"
            saved.append(SavedTensor(name, operation.reads, "mask", 1, True, operation.part))
        elif isinstance(operation, Loss):
            saved.append(SavedTensor("logits", operation.reads))
            saved.append(SavedTensor("loss", operation.reads[:-1], "float", LOSS_FLOATS))
    return saved, again


def _product_input(shapes: ActivationShapes, product: MatMul, kept: set[str]) -> Saved:
    if product.is_lookup:
        sequence = product.writes[1]
        words = SavedTensor("words", ("looked_up", sequence), "index", 1 if shapes.tp > 1 else 0)
        return [words]
    own = saved_input(shapes, product)
    is_copied = own.width == "operand" and shapes.operand < shapes.value
    if not product.value or (product.value in kept and not is_copied):
        return []
    return [own]


def saved_input(shapes: ActivationShapes, product: MatMul) -> SavedTensor:
    """The input of a product as it is kept for dW."""
    is_whole = product.value == KEY_LATENT  # which is gathered beforehand, and stays gathered
    keeps_shard = shapes.keeps_shards and product.is_column and not is_whole
    is_wide = keeps_shard or product.is_head or product.is_wide
    width: Width = "value" if is_wide else "operand"
    dims, outer = _columns(product.reads, product.value), is_outer(product.reads)
    if is_whole and shapes.kernels.keeps_shards:
        is_copied = width == "operand" and shapes.operand < shapes.value
        dims, outer = _key_latent(shapes, product.reads, is_copied=is_copied), False
    return SavedTensor(f"{product.name} input", dims, width, 1, outer, product.part)


def _key_latent(shapes: ActivationShapes, dims: Dims, *, is_copied: bool) -> Dims:
    """Dimensions of the latent that keys and values are computed from: gathered over tp and cp in
    one tensor with the keys' part with positions, unless a copy in fp8 is saved in its place."""
    if is_copied:
        return (*dims[:-1], "cp", "key_latent")
    is_gathered = shapes.tp > 1 or shapes.cp > 1
    return (*dims[:-1], "cp", "key_columns" if is_gathered else "key_latent")


def _columns(dims: Dims, value: str) -> Dims:
    """Dimensions as ActivationShapes has their sizes. value: the tensor with these dimensions."""
    if dims[-1] == "latent":
        return (*dims[:-1], LATENTS[value])
    return (*dims[:-1], "inner") if dims[-1] == "heads" else dims


def _norm(norm: Norm, kept: set[str]) -> Saved:
    """Its input and, for each row, a scale and (except for rmsnorm) a mean. Norms of heads: see
    SavedByCore."""
    if not norm.value:
        return []
    reads, statistics = _columns(norm.reads, norm.value), 1 if norm.kind == "rmsnorm" else 2
    rows = reads[:-1]
    tensors = Saved()
    if norm.value not in kept:
        tensors.append(SavedTensor(f"{norm.name} input", reads, "value", 1, True, norm.part))
    name = f"{norm.name} statistics"
    tensors.append(SavedTensor(name, rows, "float", statistics, True, norm.part))
    return tensors


def _activation(shapes: ActivationShapes, activation: Activation) -> Saved:
    """Its input; kernels that save only relu's result compute its gradient from that, and a product
    in fp8 saves another copy of it."""
    kernels, part, is_gated = shapes.kernels, activation.part, activation.is_gated
    outer, value = is_outer(activation.reads), activation.value
    stem = value.removesuffix(".up") if value.endswith(".up") else part

    def tensor(name: str, times: float = 1) -> SavedTensor:
        return SavedTensor(f"{stem} {name}", activation.reads, "value", times, outer, part)

    if activation.kind == "relu" and not is_gated and kernels.relu_by_result:
        return [tensor("result")] if shapes.operand < shapes.value else []
    gates = [tensor("gate")] if is_gated and kernels.keeps_gate else []
    return [tensor("up", 2 if is_gated else 1), *gates]


def _routing(shapes: ActivationShapes, dispatch: Dispatch) -> Saved:
    """What the router keeps: scores of all experts in float32, and of the experts of each token
    their numbers, their weights and the places of its rows; of rows that have come from other ranks
    their order. mpctl's layers keep the numbers also where the layer is recomputed, whose second
    forward chooses the same."""
    tokens, part = dispatch.reads[:-1], dispatch.part
    chosen = shapes.experts_per_token
    tensors = [
        SavedTensor("scores", (*tokens, "experts"), "float", shapes.score_tensors, True, part),
        SavedTensor(CHOICE, tokens, "index", chosen, True, part),
        SavedTensor("places", tokens, "index", chosen * shapes.etp, True, part),
        SavedTensor("router weights", tokens, "float", shapes.token_weights, True, part),
    ]
    if shapes.ep * shapes.etp > 1:
        tensors.append(SavedTensor("arrival order", ("routed",), "index", part=part))
    return tensors


CHOICE = "choice"


def _shared_gate(shapes: ActivationShapes, product: MatMul) -> Saved:
    """Of a gate of shared experts itself, and their result, which it multiplies."""
    if product.writes[-1] != "gate":
        return []
    rows, part = product.rows, product.part
    is_cast = shapes.wide > shapes.value
    return [
        SavedTensor("shared result", (*rows, "hidden"), "value", 1, True, part),
        SavedTensor("shared gate", rows, "float", 1, True, part),
        *[SavedTensor("shared gate", rows, "value", 1, True, part)] * is_cast,
    ]


def _combined(shapes: ActivationShapes, combine: Combine) -> Saved:
    """The experts' results that come back to a token, where its weights are applied to them; others
    apply the weights to the experts' rows before these are sent back."""
    if not shapes.kernels.weighs_combined:
        return []
    times = shapes.experts_per_token
    return [SavedTensor("combined rows", combine.writes, "value", times, True, combine.part)]


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
    core = block.cores[0]
    if not shapes.kernels.shares_masks:
        return []
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
