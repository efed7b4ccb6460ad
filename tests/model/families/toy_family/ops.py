"""The operator table of the toy family: a causal stack with a learned vector for every position's
parity, and no norm behind the last layer."""

from __future__ import annotations

from mpctl.model.operators.blocks import decoder_layer, embedding, output_head, word_table
from mpctl.model.operators.layer import AttentionOp, LayerStack, OperatorGroup
from mpctl.model.operators.matmul import Dims, ParameterSpec
from mpctl.model.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec

HIDDEN: Dims = ("batch", "seq", "hidden")


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """Embedding with the table of parities, the layers, and the word table as the head."""
    word = word_table(model, tp=tp)
    parity = ParameterSpec("embedding.parity.weight", (2, model.hidden), ("parity", "hidden"))
    layer = decoder_layer(model, HIDDEN, AttentionOp("attention", is_causal=True))
    stack = LayerStack(
        "layers",
        (layer,) * model.layers,
        entry=embedding(HIDDEN, word, parity),
        exit=OperatorGroup(output_head(HIDDEN, word, tied=True)),
    )
    return OperatorTable((stack,))
