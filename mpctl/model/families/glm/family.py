"""The description of GLM for the planning half (model/families/description.py)."""

from __future__ import annotations

from bisect import bisect_right

from mpctl.model.families.description import BatchArray, ModelFamily
from mpctl.model.families.glm.ops import operator_table
from mpctl.spec.families import PromptForm, PromptKind
from mpctl.spec.model import ModelSpec

MASK, START, END = "[MASK]", "[sop]", "[eop]"


def special_tokens(model: ModelSpec) -> tuple[str, ...]:
    """Names of the tokens that samples of this model contain in addition to text."""
    return (MASK, START, END)


def text_length(seq_length: int) -> int:
    """The most text that fits when spans of 3 cover 15 % of it: n + 2 n/20, 464 of 512."""
    texts = range(1, seq_length + 1)
    return bisect_right(texts, seq_length, key=lambda text: text + 2 * -(-text // 20))


def least_tokens(model: ModelSpec) -> int:
    """Tokens of text that a split must hold: one sample and one."""
    return text_length(model.seq_length) + 1


FAMILY = ModelFamily(
    name="glm",
    operator_table=operator_table,
    implementation="mpctl.train.families.glm.module:IMPLEMENTATION",
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
