"""Presets: TOML tables of devices, clusters, models, jobs and runtimes, each with its sources.

They lie in `presets/` of a checkout or inside the wheel, and in the folders that the environment
variable MPCTL_PRESETS names (as PATH does, several with `:` between them). Each folder holds one
subfolder for each kind, `clusters/my-cluster.toml`; a name in an earlier folder hides the same name
in a later one, and the bundled presets come last. A user's preset is untrusted input: a file that
cannot be read is refused by its path (InputError), and its keys are checked where it is used.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from mpctl.errors import InputError
from mpctl.spec.paths import anchored

Kind = Literal["devices", "clusters", "models", "jobs", "runtimes"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VARIABLE = "MPCTL_PRESETS"
LARGEST_FILE = 2**20  # bytes; a preset has some two thousand
# The tables of a job (by their path in it) that may start from a preset; () is the job itself.
PRESET_TABLES: dict[tuple[str, ...], Kind] = {
    (): "jobs",
    ("cluster",): "clusters",
    ("cluster", "device"): "devices",
    ("model",): "models",
}


@dataclass(frozen=True)
class PresetFile:
    """Where a preset lies. hides: a bundled preset, or one of a later folder, has the same name."""

    kind: Kind
    name: str
    path: Path
    is_bundled: bool = True
    hides: bool = False

    def read(self) -> dict[str, Any]:
        """The file's table, relative paths in it joined to its folder; InputError names the file
        where it cannot be read."""
        hint = "" if self.is_bundled else f"mend the file, or take its folder out of {VARIABLE}"
        try:
            if self.path.stat().st_size > LARGEST_FILE:
                message = f"more than {LARGEST_FILE:,} bytes, which no preset has"
                raise InputError.of("bad-preset", str(self.path), message, hint)
            table = tomllib.loads(self.path.read_text("utf-8"))
        except OSError as error:
            message = error.strerror or str(error)
            raise InputError.of("bad-preset", str(self.path), message, hint) from None
        except (ValueError, RecursionError) as error:  # bad TOML and bad UTF-8 alike
            message = f"is not TOML: {error}"
            raise InputError.of("bad-preset", str(self.path), message, hint) from None
        return _anchored(table, self)


def _anchored(table: dict[str, Any], file: PresetFile) -> dict[str, Any]:
    """A user's preset may name files beside it; the bundled ones name none."""
    if file.is_bundled or file.kind not in ("jobs", "models"):
        return table
    if file.kind == "models":
        anchored_job: dict[str, Any] = anchored({"model": table}, file.path.parent)
        return dict(anchored_job["model"])
    return anchored(table, file.path.parent)


def presets_root() -> Path:
    """The folder of the bundled presets."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_presets"
    return installed if installed.is_dir() else package.parent / "presets"


def user_folders() -> tuple[Path, ...]:
    """The folders that MPCTL_PRESETS names, in its order; InputError where one is no folder."""
    folders = tuple(Path(text) for text in search_path().split(os.pathsep) if text)
    for folder in folders:
        if not folder.is_dir():
            hint = f"name folders that hold {', '.join(KINDS)}; several with {os.pathsep!r} between"
            raise InputError.of("no-such-folder", VARIABLE, f"{folder} is not a folder", hint)
    return folders


def search_path() -> str:
    """The value of MPCTL_PRESETS; empty where it is not set."""
    return os.environ.get(VARIABLE, "")


def preset_files(kind: Kind) -> dict[str, PresetFile]:
    """The presets of a kind by name, sorted; of equal names the one that is used."""
    files: dict[str, PresetFile] = {}
    for folder, is_bundled in _folders():
        for path in (folder / kind).glob("*.toml"):
            if first := files.get(path.stem):
                files[path.stem] = PresetFile(kind, first.name, first.path, first.is_bundled, True)
            elif path.is_file():
                files[path.stem] = PresetFile(kind, path.stem, path, is_bundled)
    return dict(sorted(files.items()))


def _folders() -> Iterator[tuple[Path, bool]]:
    """Every folder that is searched, and whether it is the bundled one, which is the last."""
    yield from ((folder, False) for folder in user_folders())
    yield presets_root(), True


def preset_names(kind: Kind) -> list[str]:
    """The names of a kind's presets, sorted."""
    return list(preset_files(kind))


def find_file(kind: Kind, name: str) -> PresetFile | None:
    """The preset's file, or None. A name is only ever compared with those of the folders' files:
    no path is built from it."""
    return preset_files(kind).get(name)


def find_preset(kind: Kind, name: str) -> dict[str, Any] | None:
    """The preset's table, or None where there is none of that name; InputError names its file where
    that cannot be read."""
    file = find_file(kind, name)
    return None if file is None else file.read()


def get_file(kind: Kind, name: str, *, where: str) -> PresetFile:
    """The preset's file; raises InputError at the setting `where` with the nearest names when there
    is none."""
    file = find_file(kind, name)
    if file is None:
        names = preset_names(kind)
        import difflib  # only where something is wrong

        near = difflib.get_close_matches(name, names, n=3) or names
        raise InputError.of(
            "unknown-preset",
            where,
            f"no {kind[:-1]} preset is called {name!r}",
            f"use {', '.join(near)}; `mpctl presets` lists all",
        )
    return file
