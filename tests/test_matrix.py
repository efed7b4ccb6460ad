"""The combinations of versions that `make test-matrix` tests, and what pyproject.toml promises."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.matrix import COMBINATIONS, ROOT, TESTED, Combination, constraints, find_python, package, run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)


def test_the_bounds_of_pyproject_are_tested() -> None:
    """The oldest torch and Python that it accepts, and each Python that it names."""
    lowest = min(TESTED.values(), key=lambda version: [int(n) for n in version.split(".")])
    (bound,) = (one for one in PROJECT["dependencies"] if package(one) == "torch")
    assert lowest.startswith(bound.removeprefix("torch>="))
    assert PROJECT["requires-python"] == f">={min(TESTED)}"
    names = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: 3." in text]
    assert names == list(TESTED)


def test_readme_says_what_is_tested() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for python, torch in TESTED.items():
        assert f"{python} with {'torch ' * (python == '3.11')}{torch.rpartition('.')[0]}" in text


def test_a_combination_has_its_own_versions_and_otherwise_ours() -> None:
    lines = constraints(Combination("3.12", {"torch": "2.11.0", "numpy": "2.3.5"}))
    versions = dict(line.split("==") for line in lines)
    assert (versions["torch"], versions["numpy"]) == ("2.11.0", "2.3.5")
    assert "triton" not in versions and versions["rich"] == PINNED["rich"]


@pytest.fixture
def pyenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which no Python is found but those put into this folder."""
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    return tmp_path / "versions"


def _interpreter(pyenv: Path, release: str, exit_code: int) -> Path:
    python = pyenv / release / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    python.chmod(0o755)
    return python


def test_the_newest_release_that_starts_is_taken(pyenv: Path) -> None:
    _interpreter(pyenv, "3.12.9", 0)
    newest = _interpreter(pyenv, "3.12.10", 0)
    _interpreter(pyenv, "3.12.11", 1)
    assert find_python("3.12") == newest


def test_a_missing_python_is_named(pyenv: Path) -> None:
    assert not pyenv.exists()
    assert re.fullmatch("not run: no python3.13 on PATH .*", run(COMBINATIONS[1], ()))


def test_an_environment_that_cannot_be_made_is_named(pyenv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in makes no environment, so that there is no pip."""
    _interpreter(pyenv, "3.13.0", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(pyenv))
    result = run(COMBINATIONS[1], ())
    assert result.startswith("not run: its packages could not be installed: ")
