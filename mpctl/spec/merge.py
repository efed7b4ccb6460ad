"""Layers of a job: what lies above wins key by key, however deep, and names become tables.

The law: a table's base is what it names (`preset`, or `hf_config` for a model), else the table
below it; its own keys win over the base. Where a model table gets a base, what merely follows from
the base's shape (`chosen` in model.py) is derived anew. By hand: `cluster.device.memory_bytes = 1`
above `cluster = "selene"` keeps all of selene, and of its A100 all but the memory.
"""

from __future__ import annotations

from typing import Any

from mpctl.errors import InputError, Issue
from mpctl.spec.hf import shape_from_hf
from mpctl.spec.model import chosen
from mpctl.spec.presets import PRESET_TABLES, get_preset

Raw = dict[str, Any]
Where = tuple[str, ...]
MODEL = ("model",)


def lay(under: Any, over: Any, issues: list[Issue], where: Where = ()) -> Any:
    """`over` upon `under`, both at the path `where` of a job; neither is edited.

    What names something that cannot be found is left out and added to `issues`, so that the rest
    is still checked; InputError when that is `over` itself.
    """
    if isinstance(over, str) and where in PRESET_TABLES:
        over = {"preset": over}
    if not isinstance(over, dict) or (not isinstance(under, dict) and where not in PRESET_TABLES):
        return over
    base, own = _split(over, where)
    if base is not None:
        under = lay({}, base, issues, where)
    table = dict(under) if isinstance(under, dict) else {}
    if where == MODEL:
        table = chosen(table)
    for key, value in own.items():
        try:
            table[key] = lay(table.get(key), value, issues, (*where, key))
        except InputError as error:
            issues.extend(error.issues)
            table.pop(key, None)
    return table


def without(table: Raw, path: list[Any]) -> Raw:
    """The table less what lies at `path`, or less its nearest part that can be left out."""
    key, *rest = path
    if rest and isinstance(table.get(key), dict):
        return {**table, key: without(table[key], rest)}
    return {k: v for k, v in table.items() if k != key}


def _split(over: Raw, where: Where) -> tuple[Raw | None, Raw]:
    """What a table names as its base, if anything, and its own keys."""
    if where not in PRESET_TABLES:
        return None, over
    starts = ("preset", "hf_config") if where == MODEL else ("preset",)
    named = {key: over[key] for key in starts if over.get(key) is not None}
    if len(named) > 1:
        message = "a model starts from a config or from a preset, and model.preset is given too"
        raise InputError.of("two-bases", "model.hf_config", message, "leave one of them out")
    base = _base(where, *named.popitem()) if named else None
    return base, {key: value for key, value in over.items() if key not in starts}


def _base(where: Where, key: str, name: Any) -> Raw:
    if key == "hf_config":
        return shape_from_hf(name)
    found = get_preset(PRESET_TABLES[where], str(name), where=".".join(where) or "preset")
    return {"name": name, **found} if where else found
