"""The description of GPT for the planning half (families/description.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpctl.families.description import BatchArray, ModelFamily
from mpctl.families.gpt.ops import operator_table
from mpctl.spec.families import PromptForm, PromptKind
from mpctl.spec.model import VARIANTS, ModelSpec
from mpctl.tensor_grid import MODES


def special_tokens(model: ModelSpec) -> tuple[str, ...]:
    """Names of the tokens that samples of this model hold beside text."""
    return ()


def least_tokens(model: ModelSpec) -> int:
    """Tokens of text that a split must hold: one sample and its last target."""
    return model.seq_length + 1


if TYPE_CHECKING:
    from mpctl.families.scheme import Scheme
    from mpctl.spec.hf import ConfigReader


def hub_schemes() -> Mapping[str, tuple[Scheme, ...]]:
    """GPT2LMHeadModel with learned positions; with rotary ones LlamaForCausalLM, and its kin."""
    from mpctl.families.gpt.hub import GPT2, LLAMA, MISTRAL, QWEN2, QWEN3

    return {"learned": (GPT2,), "rotary": (LLAMA, MISTRAL, QWEN2, QWEN3)}


def config_readers() -> Mapping[str, ConfigReader]:
    """The config.json files that are read as models of this family, by model_type."""
    from mpctl.families.gpt.hub import READERS

    return READERS


FAMILY = ModelFamily(
    name="gpt",
    operator_table=operator_table,
    implementation="mpctl.families.gpt.module:IMPLEMENTATION",
    positions=("learned", "rotary", "alibi", "none"),
    norm_orders=("pre", "output", "sandwich"),
    variants=VARIANTS,
    tensor_modes=MODES,
    batch_arrays={
        "tokens": BatchArray(("batch", "seq"), is_tokens=True),
        "targets": BatchArray(("batch", "seq")),
    },
    least_tokens=least_tokens,
    prompt=PromptForm(PromptKind.CONTINUE),
    hub_schemes=hub_schemes,
    config_readers=config_readers,
    synonyms=("gpt2", "gpt_2", "gpt3", "gpt_3", "opt", "decoder", "causal_lm"),
)
