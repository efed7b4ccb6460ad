"""`mpctl stop` on runs that do not go on or do not answer; test_live.py stops one that trains."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from mpctl.records.rundir.breadcrumb import BreadcrumbState
from mpctl.records.rundir.launcher import requested_signals
from mpctl.run.history.stop import stop_run, stopping_text
from mpctl.run.launch.attempt import AttemptPhase
from tests.cli.calls import Mpctl
from tests.run.history.made import make_run, summary
from tests.run.history.test_status import going_on
from tests.run.launch.attempts import report
from tests.run.launch.command import wait_for


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 0), ("failed", 1)])
def test_a_run_that_has_ended_is_not_asked(tmp_path: Path, call: Mpctl, status: str, code: int) -> None:
    run = make_run(tmp_path / "demo", ended=summary(status), checkpoints=(10,))
    said = call("stop", run)
    assert said.code == code and not (run / "stop-request").exists()
    assert said.out.startswith(f"demo  was not running: {status} after step 20 of 20")
    assert "saved as step 10 (1.0 KiB); 10 later steps are lost" in said.out


def test_a_run_whose_launcher_is_gone(tmp_path: Path, call: Mpctl) -> None:
    run = make_run(tmp_path / "demo", steps=4)
    said = call("stop", run, "--json")
    assert said.code == 1 and not (run / "stop-request").exists()
    document = said.document
    assert (document["schema"], document["status"]) == ("mpctl.stopped/1", "interrupted")
    assert (document["was_running"], document["checkpoint"]) == (False, None)


def test_a_launcher_that_does_not_end_in_time(tmp_path: Path, call: Mpctl) -> None:
    run = going_on(tmp_path / "demo")
    said = call("stop", run, "--timeout", "0.5", "--now")
    assert said.code == 1 and requested_signals(run / "stop-request") == 2
    assert "running" in said.out and "the request stays" in said.out


def test_the_end_is_waited_for_and_what_the_run_does_is_shown(tmp_path: Path) -> None:
    run, texts = going_on(tmp_path / "demo"), list[str]()

    def end() -> None:
        wait_for(lambda: "waiting for the launcher" in texts)
        (run / "stop-request").unlink()  # by a launcher that took it for an old one
        saving = BreadcrumbState("saving step 6: 1 GiB of 2 GiB")
        report(run, saving, phase=AttemptPhase.STOPPING)
        wait_for(lambda: texts[-1] != "waiting for the launcher")
        (run / "summary.json").write_text(json.dumps(summary("stopped")))

    thread = threading.Thread(target=end)
    thread.start()
    stopped = stop_run(run, "demo", now=False, timeout=30, on_wait=texts.append)
    thread.join()
    assert (stopped.run.status, stopped.is_in_order, stopped.was_running) == ("stopped", True, True)
    assert texts[0] == "waiting for the launcher" and texts[-1] == "saving step 6: 1 GiB of 2 GiB"
    assert requested_signals(run / "stop-request") == 1


def test_between_the_request_and_the_end(tmp_path: Path) -> None:
    run = going_on(tmp_path / "demo")
    assert stopping_text(run) == "waiting for the launcher"
    report(run, BreadcrumbState("step 6"), phase=AttemptPhase.STOPPING)
    assert stopping_text(run) == "finishing the step"
    report(run, BreadcrumbState(), BreadcrumbState(), phase=AttemptPhase.STOPPING)
    assert stopping_text(run) == "ranks have ended"
