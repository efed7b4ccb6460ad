"""Which directories a launch may overwrite or resume.

Run directories of other users, and who may read those of a launch.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mpctl.cli.app import run as mpctl
from mpctl.core.errors import InputError
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.marker import MARKER, is_launched, require_own, require_own_job


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


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run directory with a checkpoint, that only its user may write, and others may enter."""
    run = tmp_path / "run"
    for folder in (run, run / "nodes", run / "checkpoints", run / "checkpoints/step-10"):
        folder.mkdir()
        folder.chmod(0o755)
    for file in ("job.json", "launcher.json", "checkpoints/step-10/job.json", "metrics.jsonl"):
        (run / file).write_text("{}")
        (run / file).chmod(0o644)
    return run


OBEYED = ("job.json", "launcher.json", "nodes", "checkpoints", "checkpoints/step-10", "checkpoints/step-10/job.json")


@needs_root
@pytest.mark.parametrize("name", OBEYED)
def test_a_launch_takes_no_job_of_another_user(saved: Path, name: str) -> None:
    """A lost job.json is restored from a checkpoint: whoever may write the directory could plant
    one there, with a command for ssh to run."""
    require_own_job(saved)
    os.chown(saved / name, OTHER, OTHER)
    with pytest.raises(InputError, match=name) as caught:
        require_own_job(saved)
    assert caught.value.issues[0].rule == "run-dir-owner"


@pytest.mark.parametrize("name", [".", *OBEYED])
@pytest.mark.parametrize(("bit", "who"), [(0o020, "group "), (0o002, "everybody")])
def test_a_launch_takes_no_job_that_others_can_write(saved: Path, name: str, bit: int, who: str) -> None:
    path = saved / name
    mode = path.stat().st_mode & 0o777 | bit
    path.chmod(mode)
    require_own(saved)
    with pytest.raises(InputError) as caught:
        require_own_job(saved)
    (issue,) = caught.value.issues
    assert issue.rule == "run-dir-shared"
    assert f"{path} can be written by {who}" in issue.message and f"{mode:04o}" in issue.message
    assert f"chmod -R go-w {saved}, or add --allow-other-owner" in (issue.hint or "")


def test_what_others_cannot_reach_may_have_any_mode(saved: Path) -> None:
    """As below a directory of mpctl's making, with umask 002."""
    for path in (saved / name for name in OBEYED):
        path.chmod(0o775)
    saved.chmod(0o700)
    require_own_job(saved)
    saved.chmod(0o711)  # others pass, but may not write; the group passes, and may
    with pytest.raises(InputError, match="group"):
        require_own_job(saved)


def test_files_that_are_not_obeyed_may_be_written(saved: Path) -> None:
    (saved / "metrics.jsonl").chmod(0o666)
    require_own_job(saved)
    require_own_job(saved / "absent")


def test_what_a_link_leads_to_is_judged_by_itself(saved: Path, tmp_path: Path) -> None:
    """It may be reached without the run directory."""
    elsewhere = tmp_path / "big-disk"
    (saved / "checkpoints").rename(elsewhere)
    (saved / "checkpoints").symlink_to(elsewhere)
    saved.chmod(0o700)
    require_own_job(saved)
    elsewhere.chmod(0o777)
    with pytest.raises(InputError, match="checkpoints can be written by"):
        require_own_job(saved)


def test_a_resumption_refuses_what_others_can_write(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "job.json").chmod(0o664)
    command = ["launch", "--resume", "--run-dir", str(saved)]
    assert mpctl(command) == 2 and "run-dir-shared" in capsys.readouterr().err
    mpctl([*command, "--allow-other-owner"])
    assert "run-dir-shared" not in capsys.readouterr().err
    mpctl(["status", str(saved)])
    assert "run-dir-shared" not in capsys.readouterr().err


@needs_root
def test_below_sudo_the_caller_s_directories_are_accepted(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", str(OTHER))
    require_own(foreign)


@needs_root
@pytest.mark.parametrize("command", [["status"], ["stop", "--timeout", "0"], ["launch", "--resume", "--run-dir"]])
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
