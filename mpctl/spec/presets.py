"""Presets: TOML tables of devices, clusters, models, jobs and runtimes, each with its sources.

They lie in `presets/` of a checkout and inside the wheel; nothing else on disk is consulted.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

from mpctl.errors import InputError

Kind = Literal["devices", "clusters", "models", "jobs", "runtimes"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The tables of a job (by their path in it) that may start from a preset; () is the job itself.
PRESET_TABLES: dict[tuple[str, ...], Kind] = {
    (): "jobs",
    ("cluster",): "clusters",
    ("cluster", "device"): "devices",
    ("model",): "models",
}


def presets_root() -> Path:
    package = Path(__file__).resolve().parent.parent
    installed = package / "_presets"
    return installed if installed.is_dir() else package.parent / "presets"


def preset_names(kind: Kind) -> list[str]:
    return sorted(path.stem for path in (presets_root() / kind).glob("*.toml"))


def find_preset(kind: Kind, name: str) -> dict[str, Any] | None:
    if name not in preset_names(kind):  # never build a path from a name that is not listed
        return None
    return tomllib.loads((presets_root() / kind / f"{name}.toml").read_text("utf-8"))


def get_preset(kind: Kind, name: str, *, where: str) -> dict[str, Any]:
    """The preset's table; raises InputError with the nearest names when there is none."""
    found = find_preset(kind, name)
    if found is None:
        names = preset_names(kind)
        import difflib  # only where something is wrong

        near = difflib.get_close_matches(name, names, n=3) or names
        raise InputError.of(
            "unknown-preset",
            where,
            f"no {kind[:-1]} preset is called {name!r}",
            f"use {', '.join(near)}; `mpctl presets` lists all",
        )
    return found
