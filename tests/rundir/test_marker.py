"""Which directories a launch may overwrite or resume.

Run directories of other users, and who may read those of a launch.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mpctl.cli.app import run as mpctl
from mpctl.errors import InputError
from mpctl.rundir.directory import RunDir
from mpctl.rundir.marker import (
    MARKER,
    is_launched,
    require_own,
)


def test_markers_of_somebody_else_are_none(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"schema": "other/1"}', "[" * 100_000):
        (tmp_path / MARKER).write_text(text)
        assert not is_launched(tmp_path), text[:20]


OTHER = 65_534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away: needs root")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A run directory with a job that belongs to another user."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.json").write_text("{}")
    (run / ".mpctl-run").touch()
    os.chown(run, OTHER, OTHER)
    return run


def test_a_directory_of_ones_own_or_none_is_accepted(tmp_path: Path) -> None:
    require_own(tmp_path)
    require_own(tmp_path / "absent")


@needs_root
def test_a_directory_of_another_user_is_refused_with_a_way_out(foreign: Path) -> None:
    with pytest.raises(InputError) as caught:
        require_own(foreign)
    (issue,) = caught.value.issues
    assert issue.rule == "run-dir-owner"
    assert str(foreign) in issue.message and "you are root" in issue.message
    assert "--allow-other-owner" in (issue.hint or "")


@needs_root
@pytest.mark.parametrize("name", ["job.json", "launcher.json", "nodes"])
def test_a_planted_file_in_a_directory_of_ones_own_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    require_own(tmp_path)
    os.chown(tmp_path / name, OTHER, OTHER)
    with pytest.raises(InputError, match=name):
        require_own(tmp_path)


@needs_root
def test_below_sudo_the_caller_s_directories_are_accepted(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_UID", str(OTHER))
    require_own(foreign)


@needs_root
@pytest.mark.parametrize(
    "command", [["status"], ["stop", "--timeout", "0"], ["launch", "--resume", "--run-dir"]]
)
def test_commands_that_act_on_a_run_refuse_one_of_another_user(
    foreign: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert mpctl([*command, str(foreign)]) == 2
    assert "run-dir-owner" in capsys.readouterr().err
    mpctl([*command, str(foreign), "--allow-other-owner"])
    assert "run-dir-owner" not in capsys.readouterr().err


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_its_user_may_enter_a_new_run_directory(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        RunDir(tmp_path / "runs" / "run").make()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "runs" / "run").stat().st_mode) == 0o700


def test_the_mode_of_a_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    RunDir(tmp_path).make()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750
