"""Values changed in the text of presets, and fitted copies of those that runs name by file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.calibrate.runs import Kind
from mpctl.measure.calibrate.write import Changes, write_changed, written
from mpctl.spec.presets import presets_root

SLOWDOWN = "slowdown"


def copy(path: Path) -> str:
    """A copy of selene at a path; the path as a run names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((presets_root() / "clusters" / "selene.toml").read_bytes())
    return str(path)


def test_a_copy_is_named_as_its_file_and_lies_in_the_folder_that_is_asked_for(tmp_path: Path) -> None:
    name = copy(tmp_path / "mine" / "ours.toml")
    (path,) = write_changed([], {("clusters", name): {SLOWDOWN: 1.25}}, tmp_path / "out")
    assert path == tmp_path / "out" / "clusters" / "ours.toml"
    assert tomllib.loads(path.read_text("utf-8"))[SLOWDOWN] == 1.25


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    names = [copy(tmp_path / folder / "ours.toml") for folder in ("a", "b")]
    changes: dict[tuple[Kind, str], Changes] = {("clusters", name): {SLOWDOWN: 1.25} for name in names}
    with pytest.raises(InputError, match="would be written to one file"):
        write_changed([], changes, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_value_with_a_unit_is_replaced_with_it() -> None:
    text = '[host]\nlayer = "800 us"  # measured\n'
    changed = written(text, {"host.layer": 2e-4})
    assert tomllib.loads(changed) == {"host": {"layer": 2e-4}} and "# measured" in changed


def test_lines_change_and_words_stay() -> None:
    text = '# a\n[operators]\nhidden = { forward = 5.0, backward = 8 }  # b\n[seen]\ndtypes = ["a"]\n'
    changed = written(text, {"operators.passes": 2.0, "seen.dtypes": '["bf16"]'})
    assert changed == ('# a\n[operators]\nhidden = { forward = 10, backward = 16 }  # b\n[seen]\ndtypes = ["bf16"]\n')


def test_a_key_is_added_to_its_table_in_each_way_to_write_one() -> None:
    for table in ("[link]\na = 1", "link = { a = 1 }", "link.a = 1"):
        changed = tomllib.loads(written(f"nodes = 2\n{table}\n", {"link.b": 2.0}))
        assert changed == {"nodes": 2, "link": {"a": 1, "b": 2}}


def test_a_value_in_braces_changes() -> None:
    text = "[kernels]\nnarrow = { fp8 = 0.6, mxfp8 = 0.5 }  # of the peak\nfp8 = 1\n"
    assert written(text, {"kernels.narrow.mxfp8": 0.55}) == text.replace("0.5 }", "0.55 }")
