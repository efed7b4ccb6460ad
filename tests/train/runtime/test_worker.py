"""What a rank writes of its steps."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest

from mpctl.core.durable import LineFile
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.train.runtime.worker import log_step


def _record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=2.5, tokens=64, step_seconds=1.0, tokens_per_second=64.0)


class FullDisk(io.StringIO):
    """A log without room for another line."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_step_is_recorded_before_a_full_log_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, record = LineFile(tmp_path / "metrics.jsonl"), _record(3)
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with pytest.raises(OSError, match="No space left on device"):
        log_step(record, metrics)
    assert json.loads(metrics.path.read_text())["step"] == 3


def test_training_goes_on_without_records_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One warning; they follow when they can be written."""
    metrics = LineFile(tmp_path / "later/metrics.jsonl")
    for step in (1, 2):
        log_step(_record(step), metrics)
    said = capsys.readouterr().out.splitlines()
    assert "records wait until it can be" in said[0] and said[1:] == ["step 1: loss 2.500000", "step 2: loss 2.500000"]
    metrics.path.parent.mkdir()
    log_step(_record(3), metrics)
    assert [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()] == [1, 2, 3]
