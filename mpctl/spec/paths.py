"""Paths in a job file, which are relative to the file and not to the directory of the shell.

By hand, in jobs/a.toml `data.path = "mine"` is jobs/mine, as it would be in any tool that reads a
file of settings. What is typed on a command line stays relative to the shell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

Raw = dict[str, Any]
PYTHON_STDLIB = "python-stdlib"  # a corpus by its name: text that every machine has
SETTINGS = (
    ("data", "path"), ("data", "tokenizer"), ("data", "corpus"), ("data", "validation"),
    ("training", "init_from"), ("model", "hf_config"),
    ("launch", "ssh", "hostfile"), ("launch", "ssh", "config"),
)  # fmt: skip


def anchored(raw: Raw, folder: Path) -> Raw:
    """The raw tables of a job file in `folder`, with their relative paths joined to it.

    What is no path is left as it is, for the schema to refuse.
    """
    for setting in SETTINGS:
        raw = _with_joined(raw, setting, folder)
    return raw


def _with_joined(raw: Raw, setting: tuple[str, ...], folder: Path) -> Raw:
    """A table with one setting below it, given by its keys, joined to the folder."""
    key, *inner = setting
    if key not in raw:
        return raw
    if not inner:
        return {**raw, key: _joined(raw[key], folder)}
    table = raw[key]
    return (
        {**raw, key: _with_joined(table, tuple(inner), folder)} if isinstance(table, dict) else raw
    )


def _joined(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return value if value in ("", PYTHON_STDLIB) else str(folder / value)
    if isinstance(value, list):
        return [_joined(item, folder) for item in value]
    if isinstance(value, dict):
        return {name: _joined(item, folder) for name, item in value.items()}
    return value


def absolute(path: str | None) -> str | None:
    """A path that means the same from any directory; the name of a corpus stays one."""
    return path if path is None or path == PYTHON_STDLIB else str(Path(path).resolve())
