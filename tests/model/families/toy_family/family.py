"""The description of the toy family, which the planning half reads."""

from __future__ import annotations

from mpctl.model.families.description import BatchArray, ModelFamily
from mpctl.spec.families import PromptForm, PromptKind
from mpctl.spec.model import ModelSpec

from .ops import operator_table

BEGIN = "[begin]"


def special_tokens(model: ModelSpec) -> tuple[str, ...]:
    """The token before each sample."""
    return (BEGIN,)


def least_tokens(model: ModelSpec) -> int:
    """One sample and its last target."""
    return model.seq_length + 1


FAMILY = ModelFamily(
    name="toy",
    operator_table=operator_table,
    implementation=f"{__package__}.module:IMPLEMENTATION",
    positions=("none",),
    shortest_sequence=2,
    batch_arrays={
        "tokens": BatchArray(("batch", "seq"), is_tokens=True),
        "targets": BatchArray(("batch", "seq")),
        "weights": BatchArray(("batch", "seq")),
    },
    special_tokens=special_tokens,
    least_tokens=least_tokens,
    prompt=PromptForm(PromptKind.CONTINUE),
)
