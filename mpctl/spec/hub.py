"""Models by their id on Hugging Face's hub, from a config.json that was fetched before; no network.

An id that no preset names (presets.py) is looked for where `--fetch` keeps configs,
`$XDG_CACHE_HOME/mpctl/models/OWNER/MODEL/config.json`, and then in the hub's own cache, where
`hf download OWNER/MODEL config.json` puts it: `models--OWNER--MODEL/snapshots/COMMIT/config.json`
in the folder of HF_HUB_CACHE.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mpctl.spec.hf import shape_from_hf
from mpctl.spec.paths import is_hub_id
from mpctl.spec.presets import find_file


def shape_by_id(name: object) -> dict[str, Any] | None:
    """Our `[model]` keys for the fetched config.json of the model with this id; None where a preset
    has the id, where nothing was fetched, and of what is no id. Raises InputError as shape_from_hf
    does."""
    if not is_hub_id(name) or find_file("models", str(name)) is not None:
        return None
    path = find_fetched(str(name))
    return None if path is None else {**shape_from_hf(str(path)), "name": path_name(str(name))}


def path_name(name: str) -> str:
    """`Qwen/Qwen2.5-7B` -> `Qwen2.5-7B`."""
    return name.rpartition("/")[2]


def find_fetched(name: str) -> Path | None:
    """The config.json of the model with this id, if it lies on this machine."""
    path = fetched_path(name)
    return path if path is not None and path.is_file() else _in_hub_cache(name)


def fetched_path(name: str) -> Path | None:
    """Where `--fetch` keeps the config.json of this id; None for a user without a home."""
    cache = _cache_folder()
    return None if cache is None else cache / "mpctl" / "models" / name / "config.json"


def _in_hub_cache(name: str) -> Path | None:
    """The config.json of the commit that the hub's cache has as `main`."""
    folder = _hub_cache()
    if folder is None:
        return None
    model = folder / f"models--{name.replace('/', '--')}"
    try:
        commit = (model / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    path = model / "snapshots" / commit / "config.json"
    return path if re.fullmatch(r"[0-9a-f]{40}", commit) and path.is_file() else None


def _hub_cache() -> Path | None:
    """The folder in which Hugging Face's own tools keep what they download."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder)
    if folder := os.environ.get("HF_HOME"):
        return Path(folder) / "hub"
    cache = _cache_folder()
    return None if cache is None else cache / "huggingface" / "hub"


def _cache_folder() -> Path | None:
    """The user's cache, by the XDG base directory specification, which ignores what is not
    absolute; None for a user without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None
