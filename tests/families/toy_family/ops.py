"""The operator table of the toy family: a causal stack with a learned vector for every position's
parity, and no norm behind the last layer."""

from __future__ import annotations

from mpctl.operators.blocks import (
    attention_weights,
    head,
    lookup,
    mlp,
    mlp_weights,
    self_attention,
    word_table,
)
from mpctl.operators.matmul import AttentionOp, Dims, LayerStack, OperatorGroup, ParameterSpec
from mpctl.operators.saved import hidden_saved
from mpctl.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec

HIDDEN: Dims = ("batch", "seq", "hidden")
BLOCK = (*self_attention(HIDDEN), *mlp(HIDDEN))


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """Embedding with the table of parities, the layers, and the word table as the head."""
    word = word_table(model, tp=tp)
    parity = ParameterSpec("embedding.parity.weight", (2, model.hidden), ("parity", "hidden"))
    stack = LayerStack(
        "layers",
        model.layers,
        OperatorGroup(BLOCK, (*attention_weights(model), *mlp_weights(model))),
        (AttentionOp("attention", is_causal=True),),
        entry=OperatorGroup((lookup(HIDDEN),), (word, parity)),
        exit=OperatorGroup(
            (head(HIDDEN, tied=True),), (word,), (hidden_saved(HIDDEN[:2], "head input"),)
        ),
    )
    return OperatorTable((stack,))
