"""The operator table of GPT: embeddings, L equal blocks, a final norm and the output head.

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

from mpctl.operators.blocks import (
    attention_weights,
    final_norm_saved,
    head,
    lookup,
    mlp,
    mlp_weights,
    norm_weights,
    self_attention,
    word_table,
)
from mpctl.operators.matmul import (
    AttentionOp,
    Dims,
    LayerStack,
    MatMul,
    OperatorGroup,
    ParameterSpec,
)
from mpctl.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec

HIDDEN: Dims = ("batch", "seq", "hidden")
JOINED: Dims = ("batch", "seq", "joined")
PROJECTED: Dims = ("batch", "seq", "projected")
PROJECTION: Dims = ("projected", "joined")
BLOCK = (*self_attention(HIDDEN), *mlp(HIDDEN))


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    word = word_table(model, tp=tp)
    period = _attentions(model)
    stack = LayerStack(
        "layers",
        model.layers,
        OperatorGroup(BLOCK, (*attention_weights(model), *mlp_weights(model))),
        period[0],
        entry=OperatorGroup((lookup(HIDDEN),), (word, *_positions(model), *_entry_norm(model))),
        exit=_exit(model, word, tp=tp),
        period=period if len(period) > 1 else (),
    )
    return OperatorTable((stack,))


def _attentions(model: ModelSpec) -> tuple[tuple[AttentionOp, ...], ...]:
    """The attention of each layer of a period, after which windows repeat."""
    plain = AttentionOp("attention", is_causal=True, has_slopes=model.position == "alibi")
    windows = [model.window_of(layer) for layer in range(model.window_period)]
    if len(set(windows)) == 1:
        windows = windows[:1]
    return tuple((replace(plain, window=window or 0),) for window in windows)


def _positions(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    if model.position != "learned":
        return ()
    shape = (model.max_positions, model.hidden)
    return (ParameterSpec("embedding.position.weight", shape, ("positions", "hidden")),)


def _entry_norm(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    return norm_weights("embedding_norm", model) if model.embedding_norm else ()


def _exit(model: ModelSpec, word: ParameterSpec, *, tp: int) -> OperatorGroup:
    """The final norm and the head, then the layers of multi-token prediction."""
    output = word if model.tied_embeddings else word_table(model, tp=tp, name="head")
    bias = (
        ParameterSpec("head.bias", (output.shape[0],), ("vocab",), decays=False),
    ) * model.head_bias
    own = OperatorGroup(
        (head(HIDDEN, tied=model.tied_embeddings),),
        (*norm_weights("final_norm", model), output, *bias),
        final_norm_saved(model, HIDDEN),
    )
    predicted = [_predicted(model, number) for number in range(model.mtp_layers)]
    return OperatorGroup(
        (*own.products, *(product for part in predicted for product in part.products)),
        (*own.weights, *(word,) * bool(predicted and not model.tied_embeddings),
         *(weight for part in predicted for weight in part.weights)),
        own.saved,
        tuple(core for part in predicted for core in part.cores),
    )  # fmt: skip


def _predicted(model: ModelSpec, number: int) -> OperatorGroup:
    """One layer of multi-token prediction, without the tables that it shares with the model."""
    name, hidden = f"mtp.{number}", model.hidden
    ends = (lookup(HIDDEN), head(HIDDEN, tied=model.tied_embeddings))
    tables = [replace(end, name=f"{name}.{end.name}", table=end.table or end.name) for end in ends]
    projection = MatMul(
        f"{name}.projection", "mtp", JOINED, ("joined", "projected"), PROJECTED, is_gathered=True
    )
    block = [replace(product, name=f"{name}.{product.name}") for product in BLOCK]
    weights = (*attention_weights(model), *mlp_weights(model))
    qkv = f"{name}.{BLOCK[0].name}"
    return OperatorGroup(
        (tables[0], projection, *block, tables[1]),
        (
            *norm_weights(f"{name}.embedding_norm", model),
            *norm_weights(f"{name}.hidden_norm", model),
            ParameterSpec(f"{projection.name}.weight", (hidden, 2 * hidden), PROJECTION),
            *(replace(weight, name=f"{name}.{weight.name}") for weight in weights),
            *norm_weights(f"{name}.final_norm", model),
        ),
        cores=(AttentionOp("attention", query_product=qkv, key_product=qkv, is_causal=True),),
    )
