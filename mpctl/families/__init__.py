"""Model families: a folder each, an operator table without torch beside the module with it.

To add a family: its folder, its lines here and in modules.py, a preset.
"""

from __future__ import annotations

from collections.abc import Callable

from mpctl.families.bert import ops as bert
from mpctl.families.bert import special as bert_special
from mpctl.families.glm import ops as glm
from mpctl.families.glm import special as glm_special
from mpctl.families.gpt import ops as gpt
from mpctl.families.gpt import special as gpt_special
from mpctl.families.t5 import ops as t5
from mpctl.families.t5 import special as t5_special
from mpctl.families.table import OperatorTable
from mpctl.spec.model import FamilyName, Model

TABLES: dict[FamilyName, Callable[..., OperatorTable]] = {
    "gpt": gpt.operator_table,
    "bert": bert.operator_table,
    "t5": t5.operator_table,
    "glm": glm.operator_table,
}
SPECIALS: dict[FamilyName, Callable[[Model], tuple[str, ...]]] = {
    "gpt": gpt_special.special_tokens,
    "bert": bert_special.special_tokens,
    "t5": t5_special.special_tokens,
    "glm": glm_special.special_tokens,
}


def get_table(model: Model, *, tp: int) -> OperatorTable:
    """The operator table of the model's family; tp only matters to how far tables are padded."""
    return TABLES[model.family](model, tp=tp)


def special_tokens(model: Model) -> tuple[str, ...]:
    """Names of the tokens that the family's samples hold beside text."""
    return SPECIALS[model.family](model)
