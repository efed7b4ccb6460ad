"""How a setting may be named, and which one is probably meant by a name that does not exist.

A setting's full name is its table and key, `parallel.tp`. Where a key stands in one table alone,
the key is enough: `tp`, `dtype`, `micro-batch-size`. Both names serve everywhere: with `--set`, in
a job file outside of its tables, in a line of a batch, and as the settings of a function. A key
that was renamed has a row in RENAMED_KEYS; its old name is read with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mpctl.errors import InputError, Issue
from mpctl.spec.base import fields_at
from mpctl.spec.job import JobSpec
from mpctl.spec.presets import PRESET_TABLES

Raw = dict[str, Any]
Where = tuple[str, ...]
DEEPEST = 3  # tables of a job within each other: cluster.device.kernels
TABLES = ("cluster", "model", "parallel", "training", "checkpoint", "data", "launch")


def full_name(key: str) -> str:
    """`tp` -> `parallel.tp`; a full name, and one that is unknown or ambiguous, as it stands."""
    name = key.replace("-", "_")
    if "." in key or name in keys_at([]):
        return key
    tables = tables_with(name)
    return f"{tables[0]}.{name}" if len(tables) == 1 else key


def tables_with(key: str) -> list[str]:
    """The tables of a job that have a key of this name; where none has, those that had it once."""
    today = [name for name in TABLES if key in keys_at([name])]
    return today or [name for name in TABLES if key in old_keys((name,))]


def full_names(settings: Mapping[str, Any]) -> Raw:
    """`{"tp": 2, "model": "gpt2"}` -> `{"parallel.tp": 2, "model": "gpt2"}`.

    Raises InputError where a setting is given under both names.
    """
    named: Raw = {}
    for key, value in settings.items():
        if (name := full_name(key)) in named:
            raise _given_twice(key if name != key else _short(settings, name), name)
        named[name] = value
    return named


def _short(settings: Mapping[str, Any], name: str) -> str:
    return next(key for key in settings if key != name and full_name(key) == name)


def with_full_names(raw: Mapping[str, Any]) -> Raw:
    """A job's tables, with each key that stands outside of them in its own:
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
    """The table with a value at `path`. key: its name as it was given; above: the table's."""
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
    where, message = (key, f"is given beside {name}") if key != name else (name, "is given twice")
    return InputError.of("given-twice", where, message, "leave one of them out")


def keys_at(path: list[str]) -> list[str]:
    """Keys that a file may hold in the table at `path`; [] where there is no such table."""
    fields = fields_at(JobSpec, path)
    starts = ["preset"] if fields and tuple(path) in PRESET_TABLES else []
    starts += ["hf_config"] if path == ["model"] else []
    return [*fields, *starts]


class RenamedKey(NamedTuple):
    """A key of the table at the path `table` of a job under its former name, which is still read,
    with a warning. A row of RENAMED_KEYS is all that renaming a key takes.

    since: the version that renamed it. new: with a dot, a key of a table within, as
    `products_fp8` of a device's kernels is read as `narrow.fp8`. new_table: the table that has the
    key now, where it is another one: `training.keep_last` is read as `checkpoint.keep_last`. Both
    tables of such a key lie directly in the job.
    """

    table: Where
    old: str
    new: str
    since: str
    new_table: Where | None = None

    @property
    def table_now(self) -> Where:
        """The path of the table that has the key today."""
        return self.table if self.new_table is None else self.new_table

    @property
    def warning(self) -> Issue:
        """What is told where a job holds the key under its old name."""
        name = ".".join([*self.table_now, self.new])
        message = f"is called {name} since version {self.since}"
        where = ".".join([*self.table, self.old])
        return Issue("renamed-key", where, message, f"write {name}: the old name will go")


TRAINING, CHECKPOINT = ("training",), ("checkpoint",)
KERNELS = ("cluster", "device", "kernels")
RENAMED_KEYS: tuple[RenamedKey, ...] = (
    RenamedKey(TRAINING, "checkpoint_interval", "interval", "0.2", CHECKPOINT),
    RenamedKey(TRAINING, "checkpoint_at_end", "at_end", "0.2", CHECKPOINT),
    RenamedKey(TRAINING, "keep_last", "keep_last", "0.2", CHECKPOINT),
    RenamedKey(TRAINING, "keep_every", "keep_every", "0.2", CHECKPOINT),
    RenamedKey(KERNELS, "products_fp8", "narrow.fp8", "0.2"),
)


def with_new_names(table: dict[str, Any], where: Where) -> tuple[dict[str, Any], list[Issue]]:
    """The table at the path `where` under today's keys, and a warning for each that was renamed.
    Keys that moved to another table are moved where `where` is the whole job, ().

    Raises InputError where a key is given under both names.
    """
    rows = [row for row in RENAMED_KEYS if _has_old_key(table, where, row)]
    for row in rows:
        table = _renamed(table, row) if row.new_table is None else _moved(table, row)
    return table, [row.warning for row in rows]


def with_all_new_names(job: dict[str, Any]) -> dict[str, Any]:
    """A whole job (a job.json) under today's keys. Raises InputError where a key is given under
    both names."""
    return _all_renamed(job, ())


def _all_renamed(table: dict[str, Any], where: Where) -> dict[str, Any]:
    table, _ = with_new_names(table, where)
    return {
        key: _all_renamed(value, (*where, key)) if isinstance(value, dict) else value
        for key, value in table.items()
    }


def old_keys(where: Where) -> list[str]:
    """The former names of keys of the table at `where`."""
    return [row.old for row in RENAMED_KEYS if row.table == where]


def _has_old_key(table: dict[str, Any], where: Where, row: RenamedKey) -> bool:
    if row.new_table is None:
        within = table.get(row.new.rpartition(".")[0], {})
        return row.table == where and row.old in table and isinstance(within, dict)
    if where:
        return False
    before, after = table.get(row.table[0]), table.get(row.new_table[0], {})
    return isinstance(before, dict) and isinstance(after, dict) and row.old in before


def _renamed(table: dict[str, Any], row: RenamedKey) -> dict[str, Any]:
    inner, _, key = row.new.rpartition(".")
    below = table.get(inner, {}) if inner else table
    if key in below:
        raise _given_as_both(row, row.new)
    if not inner:
        return {key if name == row.old else name: value for name, value in table.items()}
    rest = {name: value for name, value in table.items() if name != row.old}
    return {**rest, inner: {**below, key: table[row.old]}}


def _moved(job: dict[str, Any], row: RenamedKey) -> dict[str, Any]:
    """The job with the key of a row in the table that has it today."""
    source, target = row.table[0], row.table_now[0]
    before, after = job[source], job.get(target, {})
    if row.new in after:
        raise _given_as_both(row, f"{target}.{row.new}")
    rest = {key: value for key, value in before.items() if key != row.old}
    return {**job, source: rest, target: {**after, row.new: before[row.old]}}


def _given_as_both(row: RenamedKey, new: str) -> InputError:
    message = f"is given beside {new}, its new name"
    return InputError.of("given-twice", row.warning.where, message, "leave one of them out")
