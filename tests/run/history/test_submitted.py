"""Runs that a scheduler has: waiting, taken back, begun on a host that this one cannot see."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from mpctl.records.rundir.launcher import requested_signals
from mpctl.run.history.saved import SIGN_SECONDS, read_run
from tests.cli.calls import Mpctl
from tests.run.history.made import age, launched, make_run, summary

NO_PID = 2**31 - 1


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that prints what stands in the file `squeue`, a scancel that writes `cancelled`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, line in (("squeue", f"cat {folder}/answer"), ("scancel", f'echo "$@" > {folder}/cancelled')):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def answer(slurm: Path, state: str) -> None:
    (slurm / "answer").write_text(f"{state}|Resources|0:00|1:00|\n")


def submitted(run: Path, **more: Any) -> Path:
    job = {"backend": "slurm", "job_id": "77", "pid": NO_PID, **more}
    return launched(make_run(run, steps=0), **job)


def test_a_job_that_waits(tmp_path: Path, call: Mpctl, slurm: Path) -> None:
    run = submitted(tmp_path / "demo")
    answer(slurm, "PENDING")
    assert read_run(run).status == "submitted"
    text = " ".join(call("status", run).out.split())
    assert text.startswith("demo submitted step 0 of 20") and "job 77: PENDING (Resources)" in text
    assert call("status", run, "--json").document["job_state"] == "PENDING (Resources)"


def test_a_run_that_is_submitted_again_after_it_was_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", ended=summary("stopped"))
    age(run / "summary.json", 10)
    launched(run, job_id="77", backend="slurm", pid=NO_PID)
    assert read_run(run).status == "submitted"
    (run / "logs" / "torchrun.log").write_text("begun")
    assert read_run(run).status == "stopped"


def test_a_job_that_waits_is_cancelled(tmp_path: Path, call: Mpctl, slurm: Path) -> None:
    run = submitted(tmp_path / "demo")
    answer(slurm, "PENDING")
    said = call("stop", run)
    assert said.code == 0 and "cancelled before it began: PENDING (Resources)" in said.out
    assert (slurm / "cancelled").read_text() == "77\n"
    assert not (run / "stop-request").exists()
    assert [call("runs", run, "--json").document["runs"][0]["status"]] == ["stopped"]


def test_a_launcher_that_is_refused_in_its_job(
    tmp_path: Path, call: Mpctl, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, as there is no allocation around it. In another job a refusal changes nothing."""
    run = submitted(tmp_path / "demo")
    (run / ".mpctl-run").write_text('{"schema": "mpctl.run-dir/1"}')
    answer(slurm, "RUNNING")
    for job in ("78", "77"):
        assert read_run(run).status == "submitted"
        monkeypatch.setenv("SLURM_JOB_ID", job)
        refused = call("launch", "--resume", "--run-dir", run, "--on", "slurm")
        assert refused.code == 2 and "[no-allocation]" in refused.err
    answer(slurm, "FAILED")
    for command in ("status", "stop", "runs", "show"):
        said = " ".join(call(command, run).out.split())
        assert "failed" in said and "not inside of a Slurm allocation" in said, command
    assert "demo was not running: failed after step 0" in " ".join(call("stop", run).out.split())


@pytest.mark.parametrize("state", ["NODE_FAIL", ""])
def test_a_job_that_ended_without_a_word_has_failed(tmp_path: Path, call: Mpctl, slurm: Path, state: str) -> None:
    """As the scheduler says, which may have forgotten it."""
    run = submitted(tmp_path / "demo")
    (run / "logs" / "slurm-77.out").write_text("begin\npython3: No module named mpctl\n\n")
    answer(slurm, state) if state else (slurm / "answer").write_text("")
    document = call("status", run, "--json").document
    assert document["status"] == "failed"
    assert "its last words: python3: No module named mpctl" in document["failure"]["error"]
    assert (state or "does not know it any more") in document["failure"]["error"]
    assert document["failure"]["log"] == str(run / "logs" / "slurm-77.out")
    said = call("stop", run)
    assert said.code == 1 and "No module named mpctl" in said.out


def test_a_job_that_has_begun_is_asked_through_the_directory(tmp_path: Path, call: Mpctl, slurm: Path) -> None:
    run = submitted(tmp_path / "demo", host="elsewhere")
    for name in ("launcher.json", "metrics.jsonl"):
        age(run / name, SIGN_SECONDS + 10)
    answer(slurm, "RUNNING")
    said = call("stop", run, "--timeout", "1")
    assert said.code == 1 and requested_signals(run / "stop-request") == 1
    assert not (slurm / "cancelled").exists()


def test_a_job_that_slurm_has_forgotten(tmp_path: Path, call: Mpctl, slurm: Path) -> None:
    run = submitted(tmp_path / "demo")
    (slurm / "answer").write_text("")
    assert "the scheduler does not know it any more" in call("status", run).out
    assert call("stop", run).code == 1


def test_a_host_without_the_schedulers_commands(tmp_path: Path, call: Mpctl, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted(tmp_path / "demo")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = call("status", run)
    assert said.code == 0 and "job 77: " in " ".join(said.out.split())
