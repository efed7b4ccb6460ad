"""Paths in a job file, which are relative to the file and not to the directory of the shell.

By hand, in jobs/a.toml `data.path = "mine"` is jobs/mine. Paths on a command line are relative to
the shell's directory. Where a preset is named, a value that has a slash or ends with `.toml` is a
file's path: in jobs/a.toml
`cluster = "ours.toml"` is jobs/ours.toml, and `cluster = "ours"` the preset of that name. A model
may be the config.json of Hugging Face, or the folder that holds it, or an id of the hub:
`model = "Qwen/Qwen2.5-7B"` is the id of one (hf.py), unless there is jobs/Qwen/Qwen2.5-7B.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Raw = dict[str, Any]
PYTHON_STDLIB = "python-stdlib"  # a corpus by its name: text that every machine has
SETTINGS = (
    ("data", "path"),
    ("data", "tokenizer"),
    ("data", "corpus"),
    ("data", "validation"),
    ("data", "chat", "template"),
    ("training", "init_from"),
    ("model", "hf_config"),
    ("launch", "ssh", "hostfile"),
    ("launch", "ssh", "config"),
    ("launch", "program_dir"),
)
# Settings whose value may be a preset's name or its file's path.
PRESETS = (
    ("preset",),
    ("model",),
    ("model", "preset"),
    ("cluster",),
    ("cluster", "preset"),
    ("cluster", "device"),
    ("cluster", "device", "preset"),
    ("training", "runtime"),
)
HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)  # an owner and a model


def is_path(name: str) -> bool:
    """Whether a preset's name is a file's path: `./mine`, `mine.toml`, `config.json` and `~/a/b`
    are, `mine` is not."""
    return "/" in name or os.sep in name or name.endswith((".toml", ".json"))


def is_hub_id(name: object, folder: Path = Path()) -> bool:
    """Whether a model's name has the form of an id of Hugging Face's hub, `Qwen/Qwen2.5-7B`, and is
    not the path of a file or folder below `folder`."""
    if not isinstance(name, str) or name.endswith((".toml", ".json")):
        return False
    return bool(HUB_ID.fullmatch(name)) and not os.path.exists(folder / name)  # noqa: PTH110


def is_config(name: object) -> bool:
    """Whether a model's name is the path of its config.json: a .json file, or a folder with it."""
    if not isinstance(name, str) or not is_path(name):
        return False
    try:
        return name.endswith(".json") or (Path(name) / "config.json").is_file()
    except (OSError, ValueError):  # too long, a null character
        return False


def anchored(raw: Raw, folder: Path) -> Raw:
    """The raw tables of a job file in `folder`, with their relative paths joined to it.

    A value that is not a path is left unchanged, for the schema to refuse.
    """
    for setting in SETTINGS:
        raw = _changed(raw, setting, partial(_joined, folder=folder))
    return with_preset_files_of(raw, folder)


def with_preset_files_of(raw: Raw, folder: Path) -> Raw:
    """The raw tables of a job, with the paths of presets' files joined to `folder`; names stay, and
    so do models' ids."""
    for setting in PRESETS:
        is_model = setting[0] == "model"
        raw = _changed(raw, setting, partial(_joined_preset, folder=folder, is_model=is_model))
    return raw


def _changed(raw: Raw, setting: tuple[str, ...], change: Callable[[Any], Any]) -> Raw:
    """A table with one setting below it, given by its keys, changed."""
    key, *inner = setting
    if key not in raw:
        return raw
    if not inner:
        return {**raw, key: change(raw[key])}
    table = raw[key]
    return {**raw, key: _changed(table, tuple(inner), change)} if isinstance(table, dict) else raw


def _joined_preset(value: Any, folder: Path, *, is_model: bool) -> Any:
    """`ours.toml` in `jobs` -> `jobs/ours.toml`; a value that is not a path is unchanged."""
    if not isinstance(value, str) or not is_path(value) or (is_model and is_hub_id(value, folder)):
        return value
    joined = str(folder / value)
    return joined if is_path(joined) else f".{os.sep}{joined}"  # "./x" in "." is not the name "x"


def _joined(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return value if value in ("", PYTHON_STDLIB) else str(folder / value)
    if isinstance(value, list):
        return [_joined(item, folder) for item in value]
    if isinstance(value, dict):
        return {name: _joined(item, folder) for name, item in value.items()}
    return value


def absolute(path: str | None) -> str | None:
    """The path made absolute; the name of a corpus stays a name."""
    return path if path is None or path == PYTHON_STDLIB else str(Path(path).resolve())
