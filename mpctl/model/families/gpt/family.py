"""The description of GPT for the planning half (model/families/description.py)."""

from __future__ import annotations

from mpctl.core.tensor_grid import MODES
from mpctl.model.families.description import BatchArray, ModelFamily
from mpctl.model.families.gpt.ops import operator_table
from mpctl.spec.families import PromptForm, PromptKind
from mpctl.spec.model import VARIANTS, ModelSpec


def least_tokens(model: ModelSpec) -> int:
    """Tokens of text that a split must hold: one sample and its last target."""
    return model.seq_length + 1


FAMILY = ModelFamily(
    name="gpt",
    operator_table=operator_table,
    implementation="mpctl.train.families.gpt.module:IMPLEMENTATION",
    positions=("learned", "rotary", "alibi", "none"),
    norm_orders=("pre", "output", "sandwich"),
    variants=VARIANTS,
    tensor_modes=MODES,
    batch_arrays={"tokens": BatchArray(("batch", "seq"), is_tokens=True), "targets": BatchArray(("batch", "seq"))},
    chat_arrays={"weights": BatchArray(("batch", "seq")), "places": BatchArray(("batch", "seq"))},
    least_tokens=least_tokens,
    prompt=PromptForm(PromptKind.CONTINUE),
    hub="mpctl.model.families.gpt.hub",
    synonyms=("gpt2", "gpt_2", "gpt3", "gpt_3", "opt", "decoder", "causal_lm"),
)
