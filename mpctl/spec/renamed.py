"""Keys of a job that had another name once: still read, with a warning that names the new one.

Job files, presets, run directories (job.json), lines of a batch and `--set` all pass by merge.py,
which asks here, so that a row of RENAMED_KEYS is all that renaming a key takes. By hand, with the
row RenamedKey(("training",), "lr", "learning_rate", "0.9"), the table {"lr": 1e-4} of [training] is
read as {"learning_rate": 1e-4}.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpctl.errors import InputError, Issue


class RenamedKey(NamedTuple):
    """A key of the table at the path `table` of a job; since: the version that renamed it."""

    table: tuple[str, ...]
    old: str
    new: str
    since: str

    @property
    def warning(self) -> Issue:
        """What is told where a job holds the key under its old name."""
        name = ".".join([*self.table, self.new])
        message = f"is called {name} since version {self.since}"
        where = ".".join([*self.table, self.old])
        return Issue("renamed-key", where, message, f"write {name}: the old name will go")


RENAMED_KEYS: tuple[RenamedKey, ...] = ()


def with_new_names(
    table: dict[str, Any], where: tuple[str, ...]
) -> tuple[dict[str, Any], list[Issue]]:
    """The table at the path `where` under today's keys, and a warning for each that was renamed.

    Raises InputError where a key is given under both names.
    """
    rows = [row for row in RENAMED_KEYS if row.table == where and row.old in table]
    for row in rows:
        if row.new in table:
            message = f"is given beside {row.new}, its new name"
            raise InputError.of("given-twice", row.warning.where, message, "leave one of them out")
        table = {row.new if key == row.old else key: value for key, value in table.items()}
    return table, [row.warning for row in rows]


def old_keys(where: tuple[str, ...]) -> list[str]:
    """The former names of keys of the table at `where`."""
    return [row.old for row in RENAMED_KEYS if row.table == where]
