"""Keys of a job that had another name once: still read, with a warning that names the new one.

Job files, presets, run directories (job.json), lines of a batch and `--set` all pass by merge.py,
which asks here, so that a row of RENAMED_KEYS is all that renaming a key takes. By hand, with the
row RenamedKey(("training",), "lr", "learning_rate", "0.9"), the table {"lr": 1e-4} of [training] is
read as {"learning_rate": 1e-4}. A row with `new_table` also moves the key to another table of the
job: `training.keep_last` is read as `checkpoint.keep_last`. A new name with a dot is a key of a
table within: `products_fp8` of a device's kernels is read as `narrow.fp8`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpctl.errors import InputError, Issue

Where = tuple[str, ...]


class RenamedKey(NamedTuple):
    """A key of the table at the path `table` of a job; since: the version that renamed it;
    new_table: the table that has the key now, where it is another one. Both tables of a key that
    moved lie directly in the job."""

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
        raise _given_twice(row, row.new)
    if not inner:
        return {key if name == row.old else name: value for name, value in table.items()}
    rest = {name: value for name, value in table.items() if name != row.old}
    return {**rest, inner: {**below, key: table[row.old]}}


def _moved(job: dict[str, Any], row: RenamedKey) -> dict[str, Any]:
    """The job with the key of a row in the table that has it today."""
    source, target = row.table[0], row.table_now[0]
    before, after = job[source], job.get(target, {})
    if row.new in after:
        raise _given_twice(row, f"{target}.{row.new}")
    rest = {key: value for key, value in before.items() if key != row.old}
    return {**job, source: rest, target: {**after, row.new: before[row.old]}}


def _given_twice(row: RenamedKey, new: str) -> InputError:
    message = f"is given beside {new}, its new name"
    return InputError.of("given-twice", row.warning.where, message, "leave one of them out")
