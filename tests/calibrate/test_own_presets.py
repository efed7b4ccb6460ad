"""Fitted copies of presets that runs name by their files."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from mpctl.calibrate.runs import Constant
from mpctl.calibrate.write import write_presets, written
from mpctl.errors import InputError
from mpctl.spec.presets import presets_root

SLOWDOWN = "slowdown"


def copy(path: Path) -> str:
    """A copy of selene at a path; the path as a run names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((presets_root() / "clusters" / "selene.toml").read_bytes())
    return str(path)


def test_a_copy_is_named_as_its_file_and_lies_in_the_folder_that_is_asked_for(
    tmp_path: Path,
) -> None:
    name = copy(tmp_path / "mine" / "ours.toml")
    values = {Constant("clusters", name, SLOWDOWN, 0.1): 1.25}
    (path,) = write_presets([], values, tmp_path / "out")
    assert path == tmp_path / "out" / "clusters" / "ours.toml"
    assert tomllib.loads(path.read_text("utf-8"))[SLOWDOWN] == 1.25


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    names = [copy(tmp_path / folder / "ours.toml") for folder in ("a", "b")]
    values = {Constant("clusters", name, SLOWDOWN, 0.1): 1.25 for name in names}
    with pytest.raises(InputError, match="would be written to one file"):
        write_presets([], values, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_value_with_a_unit_is_replaced_whole() -> None:
    text = '[host]\nlayer = "800 us"  # measured\n'
    changed = written(text, {"host.layer": 2e-4})
    assert tomllib.loads(changed) == {"host": {"layer": 2e-4}} and "# measured" in changed
