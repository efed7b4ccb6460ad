""".github/workflows: valid by GitHub's schema, pinned, with few rights, and README's commands."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS: dict[str, Any] = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in PATHS}


def commands(name: str) -> list[str]:
    steps = (step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"])
    return [step["run"] for step in steps if "run" in step]


def test_they_have_the_published_form() -> None:
    """By the schema in check-jsonschema, which needs no network."""
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    done = subprocess.run([*check, "vendor.github-workflows", *map(str, PATHS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert WORKFLOWS.keys() == {"tests", "docs", "release"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_rights_are_few(path: Path) -> None:
    actions = re.findall(r"uses: *(\S+)", path.read_text("utf-8"))
    assert actions
    assert [one for one in actions if not re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", one)] == []
    workflow = WORKFLOWS[path.stem]
    assert workflow["permissions"] == {"contents": "read"}
    rights = {name: job.get("permissions", {}) for name, job in workflow["jobs"].items()}
    expected = {"id-token": "write"}
    assert {name: more for name, more in rights.items() if more} == (
        {"publish": expected} if path.stem == "release" else {}
    )
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_they_run_what_the_readme_says_on_every_python() -> None:
    assert commands("tests") == ["make test", "make demo"]
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    versions = WORKFLOWS["tests"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12", "3.13"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project.get("classifiers", [])))
    assert {*named} <= {*versions}


def test_a_release_is_of_the_tag_and_published_by_trust_alone() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert any("hatchling version" in one and "GITHUB_REF_NAME" in one for one in commands("release"))
    assert jobs["publish"]["environment"]["name"] == "pypi" and jobs["publish"]["needs"] == "build"
    *_, last = jobs["publish"]["steps"]
    assert last["uses"].startswith("pypa/gh-action-pypi-publish@") and "with" not in last


def test_the_readme_begins_with_the_two_commands() -> None:
    """Within a screen after the picture."""
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    picture = next(number for number, line in enumerate(lines) if line.startswith("!["))
    screen = lines[picture : picture + 15]
    for target in ("demo", "test"):
        assert any(line.split("#")[0].strip() == f"make {target}" for line in screen)
