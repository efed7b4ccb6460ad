"""The operator table of BERT: embeddings, L blocks, a word head and a next-sentence head.

Devlin et al., arXiv 1810.04805: word, position and segment tables, summed and normed; blocks whose
norms come after the sums; over every token h x h, gelu and a norm before the tied table with a
bias a word; over the first token h x h, tanh and two classes. Both heads' h x h are unsharded on
every rank (as in Megatron-LM), so neither sends anything. norm_order pre is Megatron's rearranged
BERT (arXiv 1909.08053, figure 7): no norm of the embeddings, one after the last block.
"""

from __future__ import annotations

from mpctl.model.operators.blocks import (
    decoder_layer,
    embedding,
    final_norm,
    linear_weights,
    norm_weights,
    output_head,
    word_table,
)
from mpctl.model.operators.layer import Activation, AttentionOp, LayerStack, Norm, Operation, OperatorGroup
from mpctl.model.operators.matmul import Dims, MatMul, ParameterSpec
from mpctl.model.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec

HIDDEN: Dims = ("batch", "seq", "hidden")
FEATURES: Dims = (*HIDDEN[:2], "features")
FIRST: Dims = ("batch", "hidden")
TRANSFORM = MatMul("transform", "head", HIDDEN, ("hidden", "features"), FEATURES, is_head=True)
POOLER = MatMul("pooler", "next", FIRST, ("hidden", "features"), ("batch", "features"))
NEXT = MatMul("next", "next", POOLER.writes, ("features", "classes"), ("batch", "classes"))
CLASSES = 2


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    word = word_table(model, tp=tp)
    is_post = model.norm_order == "post"
    layer = decoder_layer(model, HIDDEN, AttentionOp("attention"))
    norm = Norm("embedding.norm", "embedding", HIDDEN, model.norm, "embedding", norm_weights("embedding.norm", model))
    entry = embedding(HIDDEN, word, *_places(model), norm=norm if is_post else None)
    final = () if is_post else (final_norm(model, HIDDEN),)
    return OperatorTable(
        (
            LayerStack(
                "layers", (layer,) * model.layers, entry=entry, exit=OperatorGroup((*final, *_heads(model, word)))
            ),
        )
    )


def _places(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    heights = {"position": model.max_positions, "types": model.token_types}
    return tuple(
        ParameterSpec(f"embedding.{name}.weight", (height, model.hidden), (name, "hidden"))
        for name, height in heights.items()
    )


def _heads(model: ModelSpec, word: ParameterSpec) -> tuple[Operation, ...]:
    """The word head, and the next-sentence head, which reads one token of each sample."""
    hidden, features = ("hidden", model.hidden), ("features", model.hidden)
    output = word if model.tied_embeddings else ParameterSpec("head.weight", word.shape, word.dims)
    bias = ParameterSpec("head.bias", word.shape[:1], ("vocab",), decays=False)
    norm = Norm(
        "transform_norm", "head", HIDDEN, model.norm, "transform.activation", norm_weights("transform_norm", model)
    )
    head, loss = output_head(HIDDEN, output, bias, tied=model.tied_embeddings)
    assert isinstance(head, MatMul)
    return (
        TRANSFORM._replace(value="normed", weights=linear_weights("transform", features, hidden, bias=True)),
        Activation("head", HIDDEN, "gelu", is_gated=False, value="transform"),
        norm,
        head._replace(value="transform_norm"),
        loss,
        POOLER._replace(weights=linear_weights("pooler", features, hidden, bias=True)),
        NEXT._replace(weights=linear_weights("next", ("classes", CLASSES), features, bias=True)),
    )
