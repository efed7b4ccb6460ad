"""The operator table of GPT: embeddings, L equal blocks, a final norm and the output head.

Parameters of a GPT-2 shape: v h + s h + L (12 h^2 + 13 h) + 2 h, v padded (Narayanan et al., arXiv
2104.04473, eq. 2, exact form).
"""

from __future__ import annotations

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
from mpctl.operators.matmul import AttentionOp, Dims, LayerStack, OperatorGroup, ParameterSpec
from mpctl.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec

HIDDEN: Dims = ("batch", "seq", "hidden")
BLOCK = (*self_attention(HIDDEN), *mlp(HIDDEN))


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    word = word_table(model, tp=tp)
    output = word if model.tied_embeddings else word_table(model, tp=tp, name="head")
    stack = LayerStack(
        "layers",
        model.layers,
        OperatorGroup(BLOCK, (*attention_weights(model), *mlp_weights(model))),
        (AttentionOp("attention", is_causal=True),),
        entry=OperatorGroup((lookup(HIDDEN),), (word, *_positions(model))),
        exit=OperatorGroup(
            (head(HIDDEN, tied=model.tied_embeddings),),
            (*norm_weights("final_norm", model), output),
            final_norm_saved(model, HIDDEN),
        ),
    )
    return OperatorTable((stack,))


def _positions(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    if model.position != "learned":
        return ()
    shape = (model.max_positions, model.hidden)
    return (ParameterSpec("embedding.position.weight", shape, ("positions", "hidden")),)
