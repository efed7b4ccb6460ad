"""One preset's file: a TOML table, and where it lies.

A preset of one's own is untrusted input, wherever its folder is: it is read if it is a regular file
of at most LARGEST_FILE bytes, links followed, and whatever is wrong with it is told with its path
(InputError). Its keys are checked where it is used (preset_check.py), and paths in it are relative
to it (paths.py): `device = "ours.toml"` in clusters/x.toml is clusters/ours.toml.
"""

from __future__ import annotations

import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from mpctl.errors import InputError
from mpctl.spec.paths import anchored

Kind = Literal["devices", "clusters", "models", "jobs", "runtimes"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HUB_IDS = "hub_ids"  # a key of models' presets alone
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
        return _anchored(self.table(), self)

    def table(self) -> dict[str, Any]:
        """The file's table as it stands there; InputError names the file where it cannot be
        read."""
        try:
            return tomllib.loads(self.content().decode("utf-8"))
        except (ValueError, RecursionError) as error:  # bad TOML and bad UTF-8 alike
            raise self._refused(f"is not TOML: {error}") from None

    def hub_ids(self) -> list[str]:
        """The ids on Hugging Face's hub of the models that a preset of a model stands for;
        InputError names the file where it cannot be read."""
        ids = self.table().get(HUB_IDS, [])
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise self._refused(f"{HUB_IDS}: it must be a list of texts")
        return ids

    def content(self) -> bytes:
        """The file's own bytes; InputError names the file where it cannot be read."""
        try:
            found = self.path.stat()
            if not stat.S_ISREG(found.st_mode):  # a pipe would wait, /dev/zero never end
                raise self._refused("is not a regular file")
            with self.path.open("rb") as file:
                content = file.read(LARGEST_FILE + 1)
        except OSError as error:
            raise self._refused(error.strerror or str(error)) from None
        if len(content) > LARGEST_FILE:
            raise self._refused(f"more than {LARGEST_FILE:,} bytes, which no preset has")
        return content

    def _refused(self, message: str) -> InputError:
        hint = "" if self.is_bundled else "mend the file, or use another preset"
        return InputError.of("bad-preset", str(self.path), message, hint)


def _anchored(table: dict[str, Any], file: PresetFile) -> dict[str, Any]:
    """One's own preset may name files beside it; the bundled ones name none."""
    if file.is_bundled or file.kind == "runtimes":
        return table
    keys = next(keys for keys, kind in PRESET_TABLES.items() if kind == file.kind)
    raw = table
    for key in reversed(keys):
        raw = {key: raw}
    raw = anchored(raw, file.path.parent)
    for key in keys:
        raw = raw[key]
    return raw
