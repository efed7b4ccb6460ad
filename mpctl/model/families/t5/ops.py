"""The operator table of T5: an encoder, a decoder that also attends to it, one word table.

Raffel et al., arXiv 1910.10683, section 2.1: norms without a mean, no biases, a relative bias a
head that all layers of a stack add. The decoder's cross attention multiplies its own states by the
query matrix and the encoder's by a fused key-value matrix; backward both inputs' gradients are
summed over tp, one message of each length (Megatron-LM's split, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from mpctl.model.operators.blocks import (
    attention_branch,
    decoder_layer,
    embedding,
    final_norm,
    in_branch,
    linear_weights,
    mlp_branch,
    output_head,
    word_table,
)
from mpctl.model.operators.layer import SOURCE, AttentionOp, LayerStack, Operation, OperatorGroup
from mpctl.model.operators.matmul import Dims, MatMul, ParameterSpec
from mpctl.model.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec

ENCODER: Dims = ("batch", "seq", "hidden")
DECODER: Dims = ("batch", "decoder_seq", "hidden")
CROSS = "cross attention"


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    word = word_table(model, tp=tp)
    return OperatorTable((_encoder(model, word), _decoder(model, word, tp=tp)))


def _encoder(model: ModelSpec, word: ParameterSpec) -> LayerStack:
    layer = decoder_layer(model, ENCODER, AttentionOp("attention", has_bias=True))
    return LayerStack(
        "encoder.layers",
        (layer,) * model.layers,
        "seq",
        embedding(ENCODER, word),
        OperatorGroup((final_norm(model, ENCODER, "encoder.final_norm"),)),
        (_bias("encoder", model),),
    )


def _decoder(model: ModelSpec, word: ParameterSpec, *, tp: int) -> LayerStack:
    output = word if model.tied_embeddings else word_table(model, tp=tp, name="head")
    core = AttentionOp("attention", "decoder_seq", "decoder_seq", is_causal=True, has_bias=True)
    layer = OperatorGroup(
        (*attention_branch(model, DECODER, core), *_cross_branch(model), *mlp_branch(model, DECODER, behind="cross"))
    )
    norm = final_norm(model, DECODER, "decoder.final_norm")
    head = output_head(DECODER, output, tied=model.tied_embeddings)
    return LayerStack(
        "decoder.layers",
        (layer,) * (model.decoder_layers or 0),
        "decoder_seq",
        embedding(DECODER, word),
        OperatorGroup((norm, *head)),
        (_bias("decoder", model),),
    )


def _bias(stack: str, model: ModelSpec) -> ParameterSpec:
    shape = (model.relative_buckets, model.heads)
    return ParameterSpec(f"{stack}.position.weight", shape, ("buckets", "heads"))


def _cross_branch(model: ModelSpec) -> tuple[Operation, ...]:
    """Queries of the decoder's states, keys and values of the encoder's result."""
    hidden, width = ("hidden", model.hidden), model.heads * model.head_size
    target, source = (*DECODER[:-1], "heads"), (*ENCODER[:-1], "heads")
    bias = bool(model.bias)
    core = AttentionOp(CROSS, "decoder_seq", "seq", "cross.query", "cross.key_value")

    def product(
        name: str, reads: Dims, writes: Dims, value: str, outputs: tuple[str, int], inputs: tuple[str, int]
    ) -> MatMul:
        weights = linear_weights(name, outputs, inputs, bias=bias)
        return MatMul(name, CROSS, reads, (inputs[0], outputs[0]), writes, value=value, weights=weights)

    return in_branch(
        model,
        "cross",
        CROSS,
        DECODER,
        "attention",
        (
            product("cross.query", DECODER, target, "cross_norm", ("heads", width), hidden),
            product("cross.key_value", ENCODER, source, SOURCE, ("heads", 2 * width), hidden),
            core,
            product("cross.output", target, DECODER, core.result, hidden, ("heads", width)),
        ),
    )
