"""The description of BERT for the planning half (model/families/description.py)."""

from __future__ import annotations

from mpctl.model.families.bert.ops import operator_table
from mpctl.model.families.description import BatchArray, ModelFamily
from mpctl.spec.families import PromptForm, PromptKind
from mpctl.spec.model import ModelSpec

CLS, SEP, MASK = "[CLS]", "[SEP]", "[MASK]"
SPECIAL_PLACES = 3  # [CLS] A [SEP] B [SEP]


def special_tokens(model: ModelSpec) -> tuple[str, ...]:
    """Names of the tokens that samples of this model contain in addition to text."""
    return (CLS, SEP, MASK)


def least_tokens(model: ModelSpec) -> int:
    """Tokens of text that a split must hold: two samples, since a pair may take both, and one."""
    return 2 * (model.seq_length - SPECIAL_PLACES) + 1


FAMILY = ModelFamily(
    name="bert",
    operator_table=operator_table,
    implementation="mpctl.train.families.bert.module:IMPLEMENTATION",
    positions=("learned",),
    norm_orders=("post", "pre"),
    shortest_sequence=5,  # [CLS] A [SEP] B [SEP]
    batch_arrays={
        "tokens": BatchArray(("batch", "seq"), is_tokens=True),
        "types": BatchArray(("batch", "seq")),
        "targets": BatchArray(("batch", "seq")),
        "weights": BatchArray(("batch", "seq")),
        "next": BatchArray(("batch",)),
    },
    special_tokens=special_tokens,
    least_tokens=least_tokens,
    prompt=PromptForm(PromptKind.FILL_WORDS, before=(CLS,), after=(SEP,)),
    has_perplexity=False,  # the loss includes that of the next sentence
    hub="mpctl.model.families.bert.hub",
    synonyms=("roberta", "encoder", "mlm"),
)
