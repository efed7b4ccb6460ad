"""The operator table of BERT: embeddings, L blocks, a word head and a next-sentence head.

Devlin et al., arXiv 1810.04805: word, position and segment tables, summed and normed; blocks whose
norms come after the sums; over every token h x h, gelu and a norm before the tied table with a
bias a word; over the first token h x h, tanh and two classes. Both heads' h x h are whole on every
rank (Megatron-LM's split), so neither sends anything. norm_order pre is Megatron's rearranged BERT
(arXiv 1909.08053, figure 7): no norm of the embeddings, one after the last block.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.operators.blocks import (
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
from mpctl.operators.matmul import (
    AttentionOp,
    Dims,
    LayerStack,
    MatMul,
    OperatorGroup,
    ParameterSpec,
)
from mpctl.operators.saved import SavedTensor, hidden_saved, norm_saved
from mpctl.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec

HIDDEN: Dims = ("batch", "seq", "hidden")
FIRST: Dims = ("batch", "hidden")
BLOCK = (*self_attention(HIDDEN), *mlp(HIDDEN))
TRANSFORM = MatMul(
    "transform", "head", HIDDEN, ("hidden", "features"), (*HIDDEN[:2], "features"), is_head=True
)
POOLER = MatMul("pooler", "next", FIRST, ("hidden", "features"), ("batch", "features"))
NEXT = MatMul("next", "next", POOLER.writes, ("features", "classes"), ("batch", "classes"))
CLASSES = 2


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    word = word_table(model, tp=tp)
    is_post = model.norm_order == "post"
    branches = (attention_weights(model), mlp_weights(model))
    stack = LayerStack(
        "layers",
        model.layers,
        OperatorGroup(BLOCK, tuple(w for branch in branches for w in _in_order(branch, is_post))),
        (AttentionOp("attention"),),
        entry=OperatorGroup(
            (lookup(HIDDEN),),
            (word, *_places(model), *(norm_weights("embedding.norm", model) if is_post else ())),
            tuple(norm_saved(model.norm, HIDDEN[:-1], "embedding norm")) if is_post else (),
        ),
        exit=OperatorGroup(
            (TRANSFORM, head(HIDDEN, tied=model.tied_embeddings), POOLER, NEXT),
            (*(() if is_post else norm_weights("final_norm", model)), *_heads(model, word)),
            tuple(_exit_saved(model)),
        ),
    )
    return OperatorTable((stack,))


def _exit_saved(model: ModelSpec) -> Iterator[SavedTensor]:
    """The final norm where there is one, the transform's input, its activation's and its norm's."""
    rows = HIDDEN[:-1]
    if model.norm_order == "pre":
        yield from norm_saved(model.norm, rows, "final norm")
    yield hidden_saved(rows, "normed")
    yield hidden_saved(rows, "transformed")
    yield from norm_saved(model.norm, rows, "transform norm")
    yield hidden_saved(rows, "transformed")


def _in_order(branch: tuple[ParameterSpec, ...], is_post: bool) -> tuple[ParameterSpec, ...]:
    """In the order of the data: the norm first, or last where it is of the sum."""
    return tuple(sorted(branch, key=lambda weight: is_post and "_norm." in weight.name))


def _places(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    heights = {"position": model.max_positions, "types": model.token_types}
    return tuple(
        ParameterSpec(f"embedding.{name}.weight", (height, model.hidden), (name, "hidden"))
        for name, height in heights.items()
    )


def _heads(model: ModelSpec, word: ParameterSpec) -> tuple[ParameterSpec, ...]:
    hidden, features = ("hidden", model.hidden), ("features", model.hidden)
    output = word if model.tied_embeddings else ParameterSpec("head.weight", word.shape, word.dims)
    return (
        *linear_weights("transform", features, hidden, bias=True),
        *norm_weights("transform_norm", model),
        output,
        ParameterSpec("head.bias", word.shape[:1], ("vocab",), decays=False),
        *linear_weights("pooler", features, hidden, bias=True),
        *linear_weights("next", ("classes", CLASSES), features, bias=True),
    )
