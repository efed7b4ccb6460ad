"""A run goes on while its launcher is there, on this host or, as far as can be seen, on another."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mpctl.core.locks import hold_lock
from mpctl.records.rundir.launcher import START_TOLERANCE, this_launcher
from mpctl.run.history.saved import SIGN_SECONDS, is_running, last_sign, read_run
from tests.run.history.made import age, launched, make_run, summary
from tests.run.launch.attempts import report


def test_a_launcher_that_is_there(tmp_path: Path) -> None:
    run = launched(make_run(tmp_path / "run", steps=2))
    assert is_running(run) and read_run(run).status == "running"


def test_a_launcher_whose_process_id_is_now_another_process(tmp_path: Path) -> None:
    began = this_launcher("local").process_started
    assert began is not None
    run = launched(make_run(tmp_path / "run", steps=2), process_started=began - 2 * START_TOLERANCE)
    assert not is_running(run) and read_run(run).status == "interrupted"


def test_a_launcher_that_wrote_how_the_run_ended(tmp_path: Path) -> None:
    """Its process may live on; a later launcher begins by writing its launcher.json."""
    run = launched(make_run(tmp_path / "run", steps=2, ended=summary("stopped")))
    age(run / "launcher.json", 10)
    assert not is_running(run)
    launched(run)
    age(run / "summary.json", 10)
    assert is_running(run)


def test_a_lock_of_a_launcher_that_wrote_no_record(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    assert not is_running(run)
    with hold_lock(run):
        assert is_running(run)
    assert not is_running(run)


def test_a_launcher_on_another_host_is_known_by_signs_of_life(tmp_path: Path) -> None:
    run = launched(make_run(tmp_path / "run", steps=2), host="elsewhere", pid=os.getpid())
    assert is_running(run)
    for name in ("launcher.json", "metrics.jsonl"):
        age(run / name, SIGN_SECONDS + 10)
    assert not is_running(run)
    report(run)
    assert is_running(run) and time.time() - last_sign(run) < 10


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"host": 1, "pid": 2}', '{"host": "x", "pid": "y"}', "\udcff"])
def test_a_damaged_record_is_none(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "run", steps=2)
    (run / "launcher.json").write_bytes(content.encode(errors="surrogateescape"))
    assert not is_running(run) and read_run(run).status == "interrupted"


@pytest.mark.parametrize("pid", [-1, 0, 10**30])
def test_an_odd_process_id_is_no_process(tmp_path: Path, pid: int) -> None:
    run = launched(make_run(tmp_path / "run", steps=2), pid=pid)
    assert not is_running(run)
