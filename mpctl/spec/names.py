"""The names of a setting, and which one is probably meant by a name that does not exist.

A setting's full name is its table and key, `parallel.tp`. Where only one table has a key, the key
is enough: `tp`, `dtype`, `micro-batch-size`. Both names work everywhere: with `--set`, in a job
file outside its tables, in a line of a batch, and as the settings of a function. A key that was
renamed has a row in RENAMED_KEYS; its old name is read with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from mpctl.core.errors import InputError, Issue
from mpctl.spec.base import fields_at
from mpctl.spec.job import JobSpec
from mpctl.spec.presets import PRESET_TABLES

Raw = dict[str, Any]
Where = tuple[str, ...]
DEEPEST = 3  # tables of a job within each other: cluster.device.kernels
TABLES = ("cluster", "model", "parallel", "training", "checkpoint", "data", "launch")


def full_name(key: str) -> str:
    """`tp` -> `parallel.tp`; a full, unknown or ambiguous name is returned unchanged."""
    name = key.replace("-", "_")
    if "." in key or name in keys_at([]):
        return key
    tables = tables_with(name)
    return f"{tables[0]}.{name}" if len(tables) == 1 else key


def tables_with(key: str) -> list[str]:
    """The tables of a job that have a key of this name; if none has, those that had it formerly."""
    today = [name for name in TABLES if key in keys_at([name])]
    return today or [name for name in TABLES if key in old_keys((name,))]


def require_table(settings: object, where: str) -> None:
    """Raises InputError where settings are no table, or a name in it is no text."""
    if not isinstance(settings, Mapping):
        hint = 'write {"parallel": {"tp": 2}} for a job, {"tp": 2} for settings'
        raise InputError.of("bad-settings", where, f"{str(settings)[:60]!r} is no table", hint)
    if wrong := [key for key in settings if not isinstance(key, str)]:
        raise InputError.of("bad-settings", where, f"{wrong[0]!r} is no name of a setting", "use text")


def full_names(settings: Mapping[str, Any]) -> Raw:
    """`{"tp": 2, "model": "gpt2"}` -> `{"parallel.tp": 2, "model": "gpt2"}`.

    Raises InputError where a setting is given under both names, and for what is no table of names.
    """
    require_table(settings, "settings")
    named: Raw = {}
    for key, value in settings.items():
        if (name := full_name(key)) in named:
            raise _given_twice(key if name != key else _short(settings, name), name)
        named[name] = value
    return named


def _short(settings: Mapping[str, Any], name: str) -> str:
    return next(key for key in settings if key != name and full_name(key) == name)


def with_full_names(raw: Mapping[str, Any]) -> Raw:
    """A job's tables, with each key from outside of them moved into its table:
    `{"tp": 2, "model": "gpt2", "model.layers": 4}` has the tables parallel and model.

    Raises InputError where a setting is given twice.
    """
    named = {name: key for key in raw if "." in (name := full_name(key))}
    outside = full_names({key: raw[key] for key in raw if "." in full_name(key)})
    tables = {key: value for key, value in raw.items() if "." not in full_name(key)}
    for name, value in outside.items():
        tables = _put(tables, name.split(".", DEEPEST), value, named[name])
    return tables


def _put(table: Raw, path: list[str], value: Any, key: str, above: str = "") -> Raw:
    """The table with a value at `path`. key: the name that the user wrote; above: the table's."""
    first, *rest = path
    name = f"{above}{first}"
    if not rest:
        if first in table:
            raise _given_twice(key, name)
        return {**table, first: value}
    inner = table.get(first) or {}
    inner = {"preset": inner} if isinstance(inner, str) else inner
    if not isinstance(inner, dict):
        raise _given_twice(key, name)
    return {**table, first: _put(inner, rest, value, key, f"{name}.")}


def _given_twice(key: str, name: str) -> InputError:
    where, message = (key, f"is given with {name}") if key != name else (name, "is given twice")
    return InputError.of("given-twice", where, message, "leave one of them out")


def keys_at(path: list[str]) -> list[str]:
    """Keys that a file may hold in the table at `path`; [] where there is no such table."""
    fields = fields_at(JobSpec, path)
    starts = ["preset"] if fields and tuple(path) in PRESET_TABLES else []
    starts += ["hf_config"] if path == ["model"] else []
    return [*fields, *starts]


class RenamedKey(NamedTuple):
    """A setting under its former full name, which is still read, with a warning. A row of
    RENAMED_KEYS is all that renaming a key takes. since: the version that renamed it."""

    old: str
    new: str
    since: str

    @property
    def table(self) -> Where:
        """The path of the innermost table that contains both names."""
        pairs = zip(self.old.split("."), self.new.split("."), strict=False)
        return tuple(old for old, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def warning(self) -> Issue:
        """The warning for a job that has the key under its old name."""
        message = f"is called {self.new} since version {self.since}"
        hint = f"write {self.new}: the old name will go"
        return Issue("renamed-key", self.old, message, hint)


RENAMED_KEYS: tuple[RenamedKey, ...] = (
    RenamedKey("training.checkpoint_interval", "checkpoint.interval", "0.2"),
    RenamedKey("training.checkpoint_at_end", "checkpoint.at_end", "0.2"),
    RenamedKey("training.keep_last", "checkpoint.keep_last", "0.2"),
    RenamedKey("training.keep_every", "checkpoint.keep_every", "0.2"),
    RenamedKey("cluster.device.kernels.products_fp8", "cluster.device.kernels.narrow.fp8", "0.2"),
)


def with_new_names(table: Raw, where: Where) -> tuple[Raw, list[Issue]]:
    """The table at the path `where` under today's keys, and a warning for each that was renamed.
    Keys that moved to another table are moved where `where` is the complete job, ().

    Raises InputError where a key is given under both names.
    """
    warnings = []
    for row in RENAMED_KEYS:
        if row.table != where:
            continue
        (*before, old), (*after, new) = (name.split(".")[len(where) :] for name in (row.old, row.new))
        source, target = _table_at(table, before), _table_at(table, after)
        if source is None or target is None or old not in source:
            continue
        if new in target:
            message = f"is given with {'.'.join([*after, new])}, its new name"
            raise InputError.of("given-twice", row.old, message, "leave one of them out")
        table = _put(without(table, [*before, old]), [*after, new], source[old], row.old)
        warnings.append(row.warning)
    return table, warnings


def _table_at(table: Raw, path: list[str]) -> Raw | None:
    """The table at a path below this one, empty if there is none; None if it is not a table."""
    inner: Any = table
    for key in path:
        inner = inner.get(key, {}) if isinstance(inner, dict) else None
    return inner if isinstance(inner, dict) else None


def without(table: Raw, path: list[Any]) -> Raw:
    """The table without the value at `path`, or without the nearest table around it that can go."""
    key, *rest = path
    if rest and isinstance(table.get(key), dict):
        return {**table, key: without(table[key], rest)}
    return {k: v for k, v in table.items() if k != key}


def with_all_new_names(table: Raw, where: Where = ()) -> Raw:
    """A complete job (a job.json) under today's keys. Raises InputError where a key is given under
    both names."""
    table, _ = with_new_names(table, where)
    return {
        key: with_all_new_names(value, (*where, key)) if isinstance(value, dict) else value
        for key, value in table.items()
    }


def old_keys(where: Where) -> list[str]:
    """The former names of keys of the table at `where`."""
    paths = [tuple(row.old.split(".")) for row in RENAMED_KEYS]
    return [path[-1] for path in paths if path[:-1] == where]
