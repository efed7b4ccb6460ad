"""A disk that is really full: a small tmpfs, which only root can mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpctl.checkpoint.writer import SaveFailed
from mpctl.runtime.train import Trainer
from tests.runtime.tiny import make_trainer, tiny_job

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")


@pytest.fixture
def trainer(data: Path, tmp_path: Path) -> Iterator[Trainer]:
    """A trainer whose checkpoints lie on a disk of 300 KiB, which holds no checkpoint of it."""
    disk = tmp_path / "checkpoints"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this system mounts no tmpfs")
    try:
        trainer = make_trainer(tiny_job(data), tmp_path)
        assert trainer.saver.writer.total_bytes > 300 * 1024
        trainer.step = 1
        yield trainer
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_it_is_seen_before_anything_is_written(trainer: Trainer) -> None:
    with pytest.raises(SaveFailed, match=r"300\.0 KiB are free, .* are missing; none was saved"):
        trainer.save()
    assert list(trainer.saver.root.iterdir()) == []


def test_one_that_fills_up_meanwhile_is_told_and_left_as_it_was(trainer: Trainer) -> None:
    trainer.saver.writer.total_bytes = 0  # as if there had been room when the save began
    with pytest.raises(SaveFailed, match=r"No space left on device: of .* more are needed"):
        trainer.save()
    assert list(trainer.saver.root.iterdir()) == []
