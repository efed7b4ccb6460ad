"""The operator table of GLM: GPT's blocks, with a second table of positions.

Du et al., arXiv 2103.10360, sections 2.2 and 2.3: one table for the place in the corrupted text,
one for the place inside a blank, both added to the word vectors; pre-norm blocks and one linear
output.
"""

from __future__ import annotations

from mpctl.model.families.gpt.ops import HIDDEN, decoder_stack, positions
from mpctl.model.operators.blocks import embedding, word_table
from mpctl.model.operators.layer import AttentionOp
from mpctl.model.operators.matmul import ParameterSpec
from mpctl.model.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    word, shape = word_table(model, tp=tp), (model.max_positions, model.hidden)
    blocks = ParameterSpec("embedding.block.weight", shape, ("positions", "hidden"))
    entry = embedding(HIDDEN, word, *positions(model), blocks)
    core = AttentionOp("attention", has_sample_mask=True)
    return OperatorTable((decoder_stack(model, core, entry, word, tp=tp),))
