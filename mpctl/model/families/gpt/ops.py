"""The operator table of GPT: embeddings, L blocks, a final norm and the output head.

Parameters of a GPT-2 shape: v h + s h + L (12 h^2 + 13 h) + 2 h, v padded (Narayanan et al., arXiv
2104.04473, eq. 2, exact form).

A layer of multi-token prediction stands behind the last layer (DeepSeek-V3, arXiv 2412.19437,
section 2.2): the norms of the hidden states and of the next tokens' embeddings, joined to 2 h and
projected to h, a layer of the model's shape, a norm, and the output head once more. The
projection writes its part of h on each rank of tp, and the parts are gathered (eh_proj of
Megatron-Core 0.19, multi_token_prediction.py). By hand, h 8 over tp 2: the projection has 2 x 8 x 8
= 128 parameters, 64 on each rank; the word table and the head are the model's own.
"""

from __future__ import annotations

from dataclasses import replace

from mpctl.model.operators.blocks import (
    decoder_layer,
    embedding,
    final_norm,
    lookup,
    norm_weights,
    output_head,
    word_table,
)
from mpctl.model.operators.layer import AttentionOp, LayerStack, Norm, Operation, OperatorGroup, parameters_of
from mpctl.model.operators.matmul import Dims, MatMul, ParameterSpec
from mpctl.model.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec

HIDDEN: Dims = ("batch", "seq", "hidden")
JOINED: Dims = ("batch", "seq", "joined")
PROJECTED: Dims = ("batch", "seq", "projected")
PROJECTION: Dims = ("projected", "joined")


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    word = word_table(model, tp=tp)
    core = AttentionOp("attention", is_causal=True, has_slopes=model.position == "alibi")
    norm = None
    if model.embedding_norm:
        weights = norm_weights("embedding_norm", model)
        norm = Norm("embedding_norm", "embedding", HIDDEN, model.norm, "embedding", weights)
    entry = embedding(HIDDEN, word, *positions(model), norm=norm)
    return OperatorTable((decoder_stack(model, core, entry, word, tp=tp),))


def decoder_stack(
    model: ModelSpec, core: AttentionOp, entry: OperatorGroup, word: ParameterSpec, *, tp: int
) -> LayerStack:
    """Layers with this attention, whose windows repeat after a period and of which some may have
    experts, then norm and head."""
    core = _with_positions_and_norms(model, core)
    layers = range(model.layers)
    settings = [(model.window_of(layer) or 0, model.has_experts(layer)) for layer in layers]
    kinds = {
        (window, has_experts): decoder_layer(model, HIDDEN, core._replace(window=window), has_experts=has_experts)
        for window, has_experts in set(settings)
    }
    blocks = tuple(kinds[setting] for setting in settings)
    return LayerStack("layers", blocks, entry=entry, exit=_exit(model, word, tp=tp))


def _with_positions_and_norms(model: ModelSpec, core: AttentionOp) -> AttentionOp:
    return core._replace(
        is_rotary=model.position == "rotary", has_norms=bool(model.qk_norm), norms_width=model.qk_norm == "width"
    )


def positions(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    """The table of learned positions, where the model has one."""
    if model.position != "learned":
        return ()
    shape = (model.max_positions, model.hidden)
    return (ParameterSpec("embedding.position.weight", shape, ("positions", "hidden")),)


def _exit(model: ModelSpec, word: ParameterSpec, *, tp: int) -> OperatorGroup:
    """The final norm and the head, then the layers of multi-token prediction."""
    output = word if model.tied_embeddings else word_table(model, tp=tp, name="head")
    bias = (ParameterSpec("head.bias", (output.shape[0],), ("vocab",), decays=False),) * model.head_bias
    ending = (final_norm(model, HIDDEN), *output_head(HIDDEN, output, *bias, tied=model.tied_embeddings))
    predicted = (_predicted(model, word, ending, number) for number in range(model.mtp_layers))
    return OperatorGroup((*ending, *(one for part in predicted for one in part)))


def _predicted(
    model: ModelSpec, word: ParameterSpec, ending: tuple[Operation, ...], number: int
) -> tuple[Operation, ...]:
    """One layer of multi-token prediction, with the tables that it shares with the model."""
    name, core = f"mtp.{number}", AttentionOp("attention", is_causal=True)
    core = _with_positions_and_norms(model, core)
    norms = tuple(
        Norm(one, name, HIDDEN, model.norm, one, norm_weights(one, model))
        for one in (f"{name}.embedding_norm", f"{name}.hidden_norm")
    )
    shape = (model.hidden, 2 * model.hidden)
    projection = MatMul(
        f"{name}.projection",
        "mtp",
        JOINED,
        ("joined", "projected"),
        PROJECTED,
        is_gathered=True,
        value="joined",
        weights=(ParameterSpec(f"{name}.projection.weight", shape, PROJECTION),),
    )
    layer = OperatorGroup(
        tuple(
            _renamed(one, f"{name}.")
            for one in decoder_layer(model, HIDDEN, core, has_experts=model.has_experts(model.layers - 1)).operations
        )
    )
    norm, head, loss = ending
    assert isinstance(norm, Norm) and isinstance(head, MatMul)
    shared = head._replace(name=f"{name}.{head.name}")
    return (
        lookup(HIDDEN, word)._replace(name=f"{name}.embedding.word", table="embedding.word"),
        *norms,
        projection,
        layer,
        _renamed(norm, f"{name}."),
        shared,
        loss,
    )


def _renamed(operation: Operation, prefix: str) -> Operation:
    """The operation with a prefix to the names of it and its parameters."""
    if isinstance(operation, AttentionOp):
        return operation._replace(
            query_product=prefix + operation.query_product, key_product=prefix + operation.key_product
        )
    if not isinstance(operation, (MatMul, Norm)):
        return operation
    weights = tuple(replace(w, name=prefix + w.name) for w in parameters_of(operation))
    if isinstance(operation, MatMul):
        return operation._replace(name=prefix + operation.name, weights=weights)
    return operation._replace(name=prefix + operation.name, weights=weights)
