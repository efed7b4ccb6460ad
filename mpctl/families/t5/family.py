"""The description of T5 for the planning half (families/description.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpctl.families.description import BatchArray, ModelFamily
from mpctl.families.t5.ops import operator_table
from mpctl.families.t5.special import END, PAD, least_tokens, special_tokens, target_length
from mpctl.spec.families import PromptForm, PromptKind

if TYPE_CHECKING:
    from mpctl.families.scheme import Scheme
    from mpctl.spec.hf import ConfigReader


def hub_schemes() -> Mapping[str, tuple[Scheme, ...]]:
    """T5ForConditionalGeneration."""
    from mpctl.families.t5.scheme import T5

    return {"relative": (T5,)}


def config_readers() -> Mapping[str, ConfigReader]:
    """The config.json files that are read as models of this family, by model_type."""
    from mpctl.families.t5.configs import READERS

    return READERS


FAMILY = ModelFamily(
    name="t5",
    operator_table=operator_table,
    implementation="mpctl.families.t5.implementation:IMPLEMENTATION",
    positions=("relative",),
    grouped_queries=False,  # cross attention has a key and a value for every query head
    shortest_sequence=3,  # a token, a sentinel and </s>
    batch_arrays={
        "tokens": BatchArray(("batch", "seq"), is_tokens=True),
        "decoder_tokens": BatchArray(("batch", "decoder_seq"), is_tokens=True),
        "targets": BatchArray(("batch", "decoder_seq")),
        "weights": BatchArray(("batch", "decoder_seq")),
    },
    special_tokens=special_tokens,
    least_tokens=least_tokens,
    target_length=target_length,
    prompt=PromptForm(PromptKind.DECODE, after=(END,), start=PAD, end=END),
    hub_schemes=hub_schemes,
    config_readers=config_readers,
    synonyms=("mt5", "flan_t5", "ul2", "encoder_decoder", "seq2seq"),
)
