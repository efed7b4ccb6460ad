"""The operator table of T5: an encoder, a decoder that also attends to it, one word table.

Raffel et al., arXiv 1910.10683, section 2.1: norms without a mean, no biases, a relative bias a
head that all layers of a stack add. The decoder's cross attention multiplies its own states by the
query matrix and the encoder's by a fused key-value matrix; backward both inputs' gradients are
summed over tp, one message of each length (Megatron-LM's split, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from mpctl.operators.blocks import (
    attention_weights,
    final_norm_saved,
    head,
    linear_weights,
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

SOURCE: Dims = ("batch", "seq", "hidden")
TARGET: Dims = ("batch", "decoder_seq", "hidden")
TARGET_HEADS: Dims = ("batch", "decoder_seq", "heads")
CROSS = (
    MatMul("cross.query", "cross attention", TARGET, ("hidden", "heads"), TARGET_HEADS),
    MatMul("cross.key_value", "cross attention", SOURCE, ("hidden", "heads"),
            ("batch", "seq", "heads")),
    MatMul("cross.output", "cross attention", TARGET_HEADS, ("heads", "hidden"), TARGET),
)  # fmt: skip


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    word = word_table(model, tp=tp)
    return OperatorTable((_encoder(model, word), _decoder(model, word, tp=tp)))


def _encoder(model: ModelSpec, word: ParameterSpec) -> LayerStack:
    return LayerStack(
        "encoder.layers",
        model.layers,
        OperatorGroup(
            (*self_attention(SOURCE), *mlp(SOURCE)),
            (*attention_weights(model), *mlp_weights(model)),
        ),
        (AttentionOp("attention", has_bias=True),),
        entry=OperatorGroup((lookup(SOURCE),), (word,)),
        exit=OperatorGroup(
            (), norm_weights("encoder.final_norm", model), final_norm_saved(model, SOURCE)
        ),
        shared=(_bias("encoder", model),),
    )


def _decoder(model: ModelSpec, word: ParameterSpec, *, tp: int) -> LayerStack:
    output = word if model.tied_embeddings else word_table(model, tp=tp, name="head")
    return LayerStack(
        "decoder.layers",
        model.decoder_layers or 0,
        OperatorGroup(
            (*self_attention(TARGET), *CROSS, *mlp(TARGET)),
            (*attention_weights(model), *_cross_weights(model), *mlp_weights(model)),
        ),
        (AttentionOp("attention", "decoder_seq", "decoder_seq", is_causal=True, has_bias=True),
         AttentionOp("cross attention", "decoder_seq", "seq", "cross.query", "cross.key_value")),
        entry=OperatorGroup((lookup(TARGET),), (word,)),
        exit=OperatorGroup(
            (head(TARGET, tied=model.tied_embeddings),),
            (*norm_weights("decoder.final_norm", model), output),
            final_norm_saved(model, TARGET),
        ),
        shared=(_bias("decoder", model),),
    )  # fmt: skip


def _bias(stack: str, model: ModelSpec) -> ParameterSpec:
    shape = (model.relative_buckets, model.heads)
    return ParameterSpec(f"{stack}.position.weight", shape, ("buckets", "heads"))


def _cross_weights(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    hidden, width = ("hidden", model.hidden), model.heads * model.head_size
    return (
        *norm_weights("cross_norm", model),
        *linear_weights("cross.query", ("heads", width), hidden, bias=bool(model.bias)),
        *linear_weights("cross.key_value", ("heads", 2 * width), hidden, bias=bool(model.bias)),
        *linear_weights("cross.output", hidden, ("heads", width), bias=bool(model.bias)),
    )
