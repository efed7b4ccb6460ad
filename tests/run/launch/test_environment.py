"""Surroundings that would break the ranks are bad input: words and exit 2, no traceback.

A forecast is of a free host; a run on a busy one says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import mpctl
from mpctl.cli.app import run
from mpctl.records.rundir.directory import RunDir
from mpctl.run.launch.environment import busy_text, environment_issues
from mpctl.run.launch.node import torchrun
from mpctl.run.launch.node.torchrun import NodeStart, NodeTorchrun
from mpctl.spec.load import load_job
from tests.cli.calls import caller
from tests.run.launch.command import arguments

JOB = load_job(None, {"model": "gpt2"})
OWN = str(Path(mpctl.__file__).parent.parent)


def found(monkeypatch: pytest.MonkeyPatch, *folders: object) -> list[str]:
    """The issues of a process whose sys.path begins with "" and these folders."""
    monkeypatch.setattr(sys, "path", ["", *map(str, folders), *sys.path, OWN])
    return [issue.rule for issue in environment_issues(JOB)]


def test_nothing_is_wrong_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch) == []


def test_another_mpctl_and_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpctl").mkdir()
    (tmp_path / "mpctl/__init__.py").write_text("")
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path, OWN])
    other, torch = environment_issues(JOB)
    assert (other.rule, torch.rule) == ("other-mpctl", "module-hidden")
    assert str(tmp_path / "mpctl") in other.message and OWN in other.message
    assert f"{tmp_path / 'torch.py'} is found as 'torch'" in torch.message


def test_the_working_directory_is_not_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first entry of the path is this process's own: ranks start with PYTHONSAFEPATH."""
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path, OWN])
    assert list(environment_issues(JOB)) == []


def test_a_module_that_hides_python_s_own(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("x = 1\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "mpctl", "plan", "demo", "--json"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert f"{tmp_path}/json.py hides Python's own module 'json'" in ended.stderr


def test_a_path_that_is_no_text() -> None:
    job = load_job(None, {"model": "gpt2", "data.path": "/data/\udcc3\udcbc"})
    (issue,) = environment_issues(job)
    assert issue.rule == "path-not-text" and "/data/\\udcc3\\udcbc" in issue.message
    assert "LC_ALL=C.UTF-8" in issue.hint


def test_a_run_directory_that_is_no_text_can_be_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's command line goes into the log byte by byte."""
    run = RunDir(tmp_path / "l\udcc3")
    run.torchrun_log.parent.mkdir(parents=True)
    monkeypatch.setattr(torchrun.subprocess, "Popen", lambda *_, **__: SimpleNamespace(pid=1))
    NodeTorchrun(run, NodeStart(0, 1, 1, "127.0.0.1", 29500))
    assert b"l\xc3" in run.torchrun_log.read_bytes()


def test_a_name_of_300_characters(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "x" * 300
    given = arguments(data, tmp_path / name)
    unnamed = [*given[: given.index("--run-dir")], "--set", f"name={name}"]
    for argv in (given, [*given, "--overwrite"], ["launch", "--resume", "--run-dir", name], unnamed):
        assert run(argv) == 2
        assert ": File name too long" in capsys.readouterr().err


def test_the_load_of_a_busy_host_is_reported_with_the_forecast() -> None:
    said = busy_text(17.3, 2, 0.7196)
    assert said is not None
    assert "17.3 processes ran in the last minute, on 2 processors" in said
    assert "forecast of 719.6 ms" in said
    assert busy_text(0.9, 2, 0.7196) is None
    assert busy_text(17.3, 2, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.0, 50.0])
def test_a_run_reports_it_before_its_first_step(
    load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        words = "".join(f"line {n} of text {number}, {n * n}\n" for n in range(200))
        (texts / f"{number}.txt").write_text(words)
    said = caller(capsys)(
        "launch",
        "demo",
        "--tp",
        1,
        "--gpus-per-node",
        1,
        "--steps",
        1,
        "--run-dir",
        tmp_path / "run",
        "--set",
        f'data.corpus=["{texts}"]',
        "--set",
        "model.layers=1",
        "--set",
        "model.hidden=32",
        "--set",
        "model.vocab=512",
        "--set",
        "model.seq_length=32",
        "--set",
        "training.warmup_steps=0",
    )
    assert said.code == 0, said.err
    assert ("this host is busy: 50.0 processes" in said.err) == (load > 1)
