"""Which directories a launch may overwrite or resume."""

from __future__ import annotations

import json
from pathlib import Path

from mpctl.rundir.marker import COMMAND, MARKER, WORKER, is_launched, is_resumable, write_marker


def test_a_marked_directory_is_a_runs(tmp_path: Path) -> None:
    assert not is_launched(tmp_path) and not is_resumable(tmp_path)
    write_marker(tmp_path)
    assert is_launched(tmp_path) and is_resumable(tmp_path)


def test_a_plan_beside_a_job_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"schema": "mpctl.plan/1"}))
    (tmp_path / "job.json").write_text("{}")
    assert not is_launched(tmp_path) and not is_resumable(tmp_path)


def test_the_log_of_an_older_launch_does(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "torchrun.log"
    log.write_text(f"{COMMAND}torchrun --nnodes 1 {WORKER}job.json\nmore\n")
    assert is_launched(tmp_path)
    log.write_text(f"something else\n{COMMAND}torchrun {WORKER}job.json\n")
    assert not is_launched(tmp_path)


def test_markers_of_somebody_else_are_none(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"schema": "other/1"}', "[" * 100_000):
        (tmp_path / MARKER).write_text(text)
        assert not is_launched(tmp_path), text[:20]
