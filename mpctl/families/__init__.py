"""Model families: a folder each, an operator table without torch beside the module with it.

To add a family: its folder, its lines here and in modules.py, a preset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mpctl.families.bert import ops as bert
from mpctl.families.bert import special as bert_text
from mpctl.families.glm import ops as glm
from mpctl.families.glm import special as glm_text
from mpctl.families.gpt import ops as gpt
from mpctl.families.gpt import special as gpt_text
from mpctl.families.t5 import ops as t5
from mpctl.families.t5 import special as t5_text
from mpctl.operators.table import OperatorTable
from mpctl.spec.model import FamilyName, ModelSpec


@dataclass(frozen=True)
class ModelFamily:
    """What the planning half asks of a family."""

    operator_table: Callable[..., OperatorTable]
    special_tokens: Callable[[ModelSpec], tuple[str, ...]]
    least_tokens: Callable[[ModelSpec], int]


FAMILIES: dict[FamilyName, ModelFamily] = {
    "gpt": ModelFamily(gpt.operator_table, gpt_text.special_tokens, gpt_text.least_tokens),
    "bert": ModelFamily(bert.operator_table, bert_text.special_tokens, bert_text.least_tokens),
    "t5": ModelFamily(t5.operator_table, t5_text.special_tokens, t5_text.least_tokens),
    "glm": ModelFamily(glm.operator_table, glm_text.special_tokens, glm_text.least_tokens),
}


def get_table(model: ModelSpec, *, tp: int, freeze: Sequence[str] = ()) -> OperatorTable:
    """The operator table of the model's family.

    tp: tensor-parallel size, to a multiple of which vocabularies are padded. freeze: patterns of
    the parameters that are not trained (`training.freeze`).
    """
    table = FAMILIES[model.family].operator_table(model, tp=tp)
    return replace(table, freeze=tuple(freeze)) if freeze else table


def special_tokens(model: ModelSpec) -> tuple[str, ...]:
    """Names of the tokens that the family's samples hold beside text."""
    return FAMILIES[model.family].special_tokens(model)


def least_tokens(model: ModelSpec) -> int:
    """Tokens of text that a split of prepared data must hold for the family's samples."""
    return FAMILIES[model.family].least_tokens(model)
