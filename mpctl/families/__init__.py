"""Model families: a folder each, an operator table without torch beside the module with it.

To add a family: its folder, one line here, a preset.
"""

from __future__ import annotations

from mpctl.families.gpt import ops as gpt
from mpctl.families.table import OperatorTable
from mpctl.spec.model import Model

TABLES = {"gpt": gpt.operator_table}


def find_table(model: Model, *, tp: int) -> OperatorTable | None:
    """The operator table of the model's family, or None while the family has none."""
    build = TABLES.get(model.family)
    return build(model, tp=tp) if build else None
