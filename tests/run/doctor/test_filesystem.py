"""The run directory, measured without leaving anything there."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.run.doctor.filesystem import file_system, nearest_folder, probe_folder

MOUNTS = """\
/dev/vda / ext4 rw 0 0
proc /proc proc rw 0 0
store:/export /shared nfs4 rw 0 0
tmpfs /shared/my\\040scratch tmpfs rw 0 0
overlay / overlay rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/shared/runs/demo", "nfs4"),
        ("/shared/my scratch", "tmpfs"),
        ("/sharedness", "overlay"),  # the later of two on one point lies on top
        ("/proc", "proc"),
    ],
)
def test_the_file_system_is_that_of_the_longest_mount_point(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    folder = probe_folder(run)
    assert folder.path == str(run)
    assert folder.probed == str(tmp_path)
    assert (folder.write_error, folder.lock_error, folder.map_error) == (None, None, None)
    assert folder.write_rate is not None and folder.write_rate > 0
    assert folder.sync_seconds is not None and folder.sync_seconds > 0
    assert 0 < folder.free <= folder.total
    assert folder.is_shared is None
    assert list(tmp_path.iterdir()) == []


def test_the_nonce_of_the_launcher_shows_whether_the_folder_is_shared(tmp_path: Path) -> None:
    (tmp_path / ".nonce").write_text("abc")
    assert probe_folder(tmp_path, ".nonce", "abc").is_shared is True
    assert probe_folder(tmp_path, ".nonce", "other").is_shared is False
    assert probe_folder(tmp_path, ".elsewhere", "abc").is_shared is False


def test_a_folder_that_cannot_be_written_reports_why() -> None:
    folder = probe_folder(Path("/proc/self/runs"))
    assert folder.write_error
    assert folder.write_rate is None


def test_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    assert nearest_folder(file / "below") == tmp_path.resolve()
    monkeypatch.chdir(tmp_path)
    assert nearest_folder(Path("runs")) == tmp_path.resolve()
