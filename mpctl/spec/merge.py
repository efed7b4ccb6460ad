"""Layers of a job: what lies above wins key by key, however deep, and names become tables.

The law: a table's base is what it names (`preset`, or `hf_config` for a model), else the table
below it; its own keys win over the base. Where a model table gets a base, what merely follows from
the base's shape (`derived_values` in model.py) is derived anew. By hand:
`cluster.device.memory_bytes = 1` above `cluster = "selene"` keeps all of selene, and of its A100
all but the memory. A key under a former name counts as the new one (renamed.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpctl.errors import InputError, Issue
from mpctl.spec.base import StrictModel
from mpctl.spec.cluster import ClusterSpec, DeviceSpec
from mpctl.spec.hf import shape_from_hf
from mpctl.spec.hub import shape_by_id
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec, with_positions, without_derived
from mpctl.spec.names import DEEPEST, with_full_names
from mpctl.spec.paths import anchored, is_config
from mpctl.spec.preset_check import require_valid
from mpctl.spec.preset_file import HUB_IDS
from mpctl.spec.presets import PRESET_TABLES, PresetFile, get_file
from mpctl.spec.renamed import with_new_names

Raw = dict[str, Any]
Where = tuple[str, ...]
MODEL = ("model",)
LONGEST_TRAIL = 16  # presets that start from each other
MODELS: dict[Where, type[StrictModel]] = {
    (): JobSpec,
    ("cluster",): ClusterSpec,
    ("cluster", "device"): DeviceSpec,
    MODEL: ModelSpec,
}


class Base(NamedTuple):
    """What a table starts from; file: the preset's, None for the shape of a config.json."""

    table: Raw
    file: PresetFile | None = None


class Notes(NamedTuple):
    """What came up while tables were laid upon each other: errors, and warnings of old names."""

    issues: list[Issue]
    warnings: list[Issue]


def lay(
    under: Any, over: Any, notes: Notes, where: Where = (), trail: tuple[PresetFile, ...] = ()
) -> Any:
    """The table `over` upon `under`, both at the path `where` of a job; neither is edited.

    trail: the presets that led to `over`, each starting from the next. What names
    something that cannot be found is left out and added to the notes' issues, so that the rest is
    still checked; InputError when that is `over` itself.
    """
    if isinstance(over, str) and where in PRESET_TABLES:
        over = {"preset": over}
    if not isinstance(over, dict) or (not isinstance(under, dict) and len(where) > DEEPEST):
        return over
    over, renamed = with_new_names(over, where)
    notes.warnings.extend(renamed)
    base, keys = _split(over, where)
    if base is not None:
        under = _expanded(base, notes, where, trail)
        if where == MODEL and isinstance(under, dict):
            under = with_positions(under)
    table = dict(under) if isinstance(under, dict) else {}
    if where == MODEL:
        table = without_derived(table)
    for key, value in keys.items():
        try:
            table[key] = lay(table.get(key), value, notes, (*where, key))
        except InputError as error:
            notes.issues.extend(error.issues)
            table.pop(key, None)
    return table


def _expanded(base: Base, notes: Notes, where: Where, trail: tuple[PresetFile, ...]) -> Any:
    """The table that a base stands for, with what it starts from itself. Raises InputError where
    presets start from each other in a circle or too often, or one's own holds what no job may."""
    if base.file is None:
        return lay({}, base.table, notes, where)
    trail = (*trail, base.file)
    names, path = " -> ".join(file.name for file in trail), str(base.file.path)
    if base.file.path.resolve() in {file.path.resolve() for file in trail[:-1]}:
        message = f"presets start from each other: {names}"
        raise InputError.of("preset-circle", path, message, "rename one of them")
    if len(trail) > LONGEST_TRAIL:
        message = f"more than {LONGEST_TRAIL} presets start from each other: {names}"
        raise InputError.of("preset-circle", path, message, "put some of them into one file")
    table = lay({}, base.table, notes, where, trail)
    if not base.file.is_bundled:
        require_valid(base.file, table, MODELS[where])
    return table


def without(table: Raw, path: list[Any]) -> Raw:
    """The table less what lies at `path`, or less its nearest part that can be left out."""
    key, *rest = path
    if rest and isinstance(table.get(key), dict):
        return {**table, key: without(table[key], rest)}
    return {k: v for k, v in table.items() if k != key}


def _split(over: Raw, where: Where) -> tuple[Base | None, Raw]:
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


def _base(where: Where, key: str, name: Any) -> Base:
    if key == "hf_config" or (where == MODEL and is_config(name)):
        return Base(shape_from_hf(name))
    if where == MODEL and (shape := shape_by_id(name)) is not None:
        return Base(shape)
    file = get_file(PRESET_TABLES[where], str(name), where=".".join(where) or "preset")
    if not where:
        return Base(read_job_preset(file), file)
    table = {"name": file.name, **file.read()}
    if where == MODEL:
        file.hub_ids()  # refused where they are no list
        table.pop(HUB_IDS, None)  # of the preset, not of what starts from it
    return Base(table, file)


def read_job_preset(file: PresetFile) -> Raw:
    """A job preset's tables, settings under their full names. Raises InputError."""
    table = with_full_names(file.table())
    return table if file.is_bundled else anchored(table, file.path.parent)
