"""The operator table of T5: an encoder, a decoder that also attends to it, one word table.

Raffel et al., arXiv 1910.10683, section 2.1: norms without a mean, no biases, a relative bias a
head that all layers of a stack add. The decoder's cross attention multiplies its own states by the
query matrix and the encoder's by a fused key-value matrix; backward both inputs' gradients are
summed over tp, one message of each length (Megatron-LM's split, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from mpctl.families.products import Core, Dims, Part, Product, Stack, Weight
from mpctl.families.shapes import (
    attention_weights,
    head,
    linear_weights,
    lookup,
    mlp,
    mlp_weights,
    norm_weights,
    self_attention,
    word_table,
)
from mpctl.families.table import OperatorTable
from mpctl.spec.model import Model

SOURCE: Dims = ("batch", "seq", "hidden")
TARGET: Dims = ("batch", "decoder_seq", "hidden")
TARGET_HEADS: Dims = ("batch", "decoder_seq", "heads")
CROSS = (
    Product("cross.query", "cross attention", TARGET, ("hidden", "heads"), TARGET_HEADS),
    Product("cross.key_value", "cross attention", SOURCE, ("hidden", "heads"),
            ("batch", "seq", "heads")),
    Product("cross.output", "cross attention", TARGET_HEADS, ("heads", "hidden"), TARGET),
)  # fmt: skip


def operator_table(model: Model, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    word = word_table(model, tp=tp)
    return OperatorTable((_encoder(model, word), _decoder(model, word, tp=tp)))


def _encoder(model: Model, word: Weight) -> Stack:
    return Stack(
        "encoder.layers",
        model.layers,
        Part(
            (*self_attention(SOURCE), *mlp(SOURCE)),
            (*attention_weights(model), *mlp_weights(model)),
        ),
        (Core("attention"),),
        entry=Part((lookup(SOURCE),), (word,)),
        exit=Part((), norm_weights("encoder.final_norm", model)),
        shared=(_bias("encoder", model),),
    )


def _decoder(model: Model, word: Weight, *, tp: int) -> Stack:
    output = word if model.tied_embeddings else word_table(model, tp=tp, name="head")
    return Stack(
        "decoder.layers",
        model.decoder_layers or 0,
        Part(
            (*self_attention(TARGET), *CROSS, *mlp(TARGET)),
            (*attention_weights(model), *_cross_weights(model), *mlp_weights(model)),
        ),
        (Core("attention", "decoder_seq", "decoder_seq"),
         Core("cross attention", "decoder_seq", "seq", "cross.query", "cross.key_value")),
        entry=Part((lookup(TARGET),), (word,)),
        exit=Part(
            (head(TARGET, tied=model.tied_embeddings),),
            (*norm_weights("decoder.final_norm", model), output),
        ),
        shared=(_bias("decoder", model),),
    )  # fmt: skip


def _bias(stack: str, model: Model) -> Weight:
    shape = (model.relative_buckets, model.heads)
    return Weight(f"{stack}.position.weight", shape, ("buckets", "heads"))


def _cross_weights(model: Model) -> tuple[Weight, ...]:
    hidden, width = ("hidden", model.hidden), model.heads * model.head_size
    return (
        *norm_weights("cross_norm", model),
        *linear_weights("cross.query", ("heads", width), hidden, bias=model.bias),
        *linear_weights("cross.key_value", ("heads", 2 * width), hidden, bias=model.bias),
        *linear_weights("cross.output", hidden, ("heads", width), bias=model.bias),
    )
