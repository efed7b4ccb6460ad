"""`-` is no file to write: stdout has the result of a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.cli.files import require_files
from tests.cli.calls import Mpctl


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "demo", "--html", "-"),
        ("plan", "demo", "--svg=-"),
        ("plan", "demo", "--trace", "-"),
        ("search", "demo", "--csv", "-"),
        ("show", "a", "--out", "-"),
        ("calibrate", "a.log", "--out", "-"),
    ],
    ids=" ".join,
)
def test_a_dash_is_refused_before_anything_is_done(
    words: tuple[str, ...], mpctl: Mpctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = mpctl(*words)
    assert said.code == 2 and "- is no file: stdout has the result" in said.err
    assert list(tmp_path.iterdir()) == []
    assert "usage" in mpctl(*words, "--json").issues


@pytest.mark.parametrize("option", ["--html", "--csv"])
def test_a_missing_folder_is_found_before_the_work(option: str, mpctl: Mpctl, tmp_path: Path) -> None:
    for words in ((option, tmp_path / "no" / "x"), (f"{option}={tmp_path / 'no' / 'x'}",)):
        said = mpctl("search", "no-such-job", *words)
        assert said.code == 2 and "there is no folder" in said.err


def test_other_dashes_stay() -> None:
    """Jobs and batches are read from stdin, and words after -- are a program's."""
    require_files(["plan", "-", "--batch", "-", "--html", "a-b.html", "--out", "x"])
    require_files(["launch", "demo", "--", "--out", "-"])
