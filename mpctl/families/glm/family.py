"""The description of GLM for the planning half (families/description.py)."""

from __future__ import annotations

from mpctl.families.description import BatchArray, ModelFamily
from mpctl.families.glm.ops import operator_table
from mpctl.families.glm.special import END, START, least_tokens, special_tokens
from mpctl.spec.families import PromptForm, PromptKind

FAMILY = ModelFamily(
    name="glm",
    operator_table=operator_table,
    implementation="mpctl.families.glm.implementation:IMPLEMENTATION",
    positions=("learned",),
    shortest_sequence=3,  # [MASK], [sop] and a token
    batch_arrays={
        "tokens": BatchArray(("batch", "seq"), is_tokens=True),
        "positions": BatchArray(("batch", "seq")),
        "blocks": BatchArray(("batch", "seq")),
        "targets": BatchArray(("batch", "seq")),
        "weights": BatchArray(("batch", "seq")),
        "context": BatchArray(("batch",)),
    },
    special_tokens=special_tokens,
    least_tokens=least_tokens,
    prompt=PromptForm(PromptKind.FILL_BLANKS, start=START, end=END),
    synonyms=("chatglm", "glm4"),
)
