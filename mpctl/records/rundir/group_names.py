"""Names of groups in files of older versions, in which `dp` was the group of dp x cp replicas.

>>> with_group_names({"dp": 0.25, "tp": 0.5}), with_group_names({"dp all_reduce": 3})
({'dp_cp': 0.25, 'tp': 0.5}, {'dp_cp all_reduce': 3})
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def group_name(name: str) -> str:
    """The current name of a group, or of a group and a kind of collective. No message has ever gone
    over dp alone."""
    return re.sub(r"^dp\b", "dp_cp", name)


def with_group_names(table: Mapping[str, Value]) -> dict[str, Value]:
    """A table with such names as keys, renamed to the current ones."""
    return {group_name(name): value for name, value in table.items()}
