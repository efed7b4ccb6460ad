"""A recorded run directory of version 0.1.0: files of older versions can still be read.

tests/recorded/run-0.1.0: a GPT of two layers under tp 2, dropout on, ended after its checkpoint of
step 2 of 4; metrics-whole.jsonl holds the losses of all four steps as that version computed them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mpctl.cli.app import run as mpctl

RECORDED = Path(__file__).parents[2] / "recorded" / "run-0.1.0"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may write to: job.toml, text.txt and run/."""
    shutil.copytree(RECORDED, tmp_path / "before")
    return tmp_path / "before"


def losses(path: Path) -> dict[int, float]:
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.slow
def test_a_run_continues_where_the_older_version_would_have(folder: Path) -> None:
    argv = ["launch", str(folder / "job.toml"), "--resume", "--run-dir", str(folder / "run")]
    assert mpctl(argv) == 0
    expected = losses(folder / "metrics-whole.jsonl")
    assert sorted(expected) == [1, 2, 3, 4]
    assert losses(folder / "run" / "metrics.jsonl") == pytest.approx(expected, rel=1e-6)
    summary = json.loads((folder / "run" / "summary.json").read_text("utf-8"))
    assert all(rank["agrees"] for rank in summary["plan_beside_run"])


def test_its_files_are_listed_and_shown(folder: Path, capsys: Capture) -> None:
    assert mpctl(["runs", str(folder), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["runs"]
    assert entry["name"] == "run"
    assert mpctl(["show", str(folder / "run"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema"] == "mpctl.show/1"


@pytest.mark.slow
def test_another_layout_loads_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "one-rank"
    argv = [
        "launch",
        str(folder / "job.toml"),
        "--tp",
        "1",
        "--run-dir",
        str(run),
        "--steps",
        "1",
        "--set",
        f"training.init_from={folder / 'run'}",
    ]
    assert mpctl(argv) == 0
    assert losses(run / "metrics.jsonl")[1] < 5.59
