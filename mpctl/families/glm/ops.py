"""The operator table of GLM: GPT's blocks, with a second table of positions.

Du et al., arXiv 2103.10360, sections 2.2 and 2.3: one table for the place in the corrupted text,
one for the place inside a blank, both added to the word vectors; pre-norm blocks and one linear
output.
"""

from __future__ import annotations

from dataclasses import replace

from mpctl.families.gpt import ops as gpt
from mpctl.operators.matmul import AttentionOp, ParameterSpec
from mpctl.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec


def operator_table(model: ModelSpec, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    (stack,) = gpt.operator_table(model, tp=tp).stacks
    shape = (model.max_positions, model.hidden)
    blocks = ParameterSpec("embedding.block.weight", shape, ("positions", "hidden"))
    entry = replace(stack.entry, weights=(*stack.entry.weights, blocks))
    attention = AttentionOp("attention", has_sample_mask=True)
    return OperatorTable((replace(stack, entry=entry, cores=(attention,)),))
