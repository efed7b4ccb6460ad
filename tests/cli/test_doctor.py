"""`mpctl doctor` as a user types it, on this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mpctl.run.doctor.documents import Diagnosis
from tests.cli.calls import Mpctl
from tests.run.launch.command import wait_for
from tests.started import started


@pytest.mark.slow
def test_this_machine_is_ready_for_the_demo(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("doctor", "demo", "--run-dir", tmp_path / "runs", "--json")
    assert said.code == 0, said.out
    diagnosis = Diagnosis.model_validate(said.document)
    assert said.document["schema"] == "mpctl.doctor/1"
    assert (diagnosis.backend, diagnosis.job) == ("local", "demo")
    (host,) = diagnosis.hosts
    assert host.failures == []
    assert host.folder is not None and host.folder.is_shared is True
    assert diagnosis.pairs == [] and diagnosis.all_pairs == 0
    assert all(finding.status == "warning" for finding in diagnosis.findings)
    assert list(tmp_path.iterdir()) == []  # nothing is left


@pytest.mark.slow
def test_a_run_directory_that_cannot_be_written_is_exit_code_1(mpctl: Mpctl) -> None:
    said = mpctl("doctor", "--run-dir", "/proc/runs", "--redact", "--markdown")
    assert said.code == 1
    assert "- **error** run directory on host-1: cannot write to /proc (proc)" in said.out
    assert "→ name a --run-dir that may be written" in said.out


@pytest.mark.slow
def test_a_job_that_this_machine_cannot_run(mpctl: Mpctl, tmp_path: Path) -> None:
    """A job of 1,024 GPUs: its launch would be refused, and doctor says why without starting it."""
    said = mpctl("doctor", "gpt3-175b-1024", "--dtype", "bf16", "--run-dir", tmp_path)
    assert said.code == 1
    assert "world-fits-machine" in said.out
    assert "would break a launch of gpt3-175b-1024" in said.out.splitlines()[-1]


@pytest.mark.slow
def test_all_reduces_are_timed(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("doctor", "--collectives", "--run-dir", tmp_path, "--json")
    assert said.code == 0, said.out
    (report,) = Diagnosis.model_validate(said.document).collectives
    assert (report.backend, report.hosts, report.errors) == ("gloo", 1, {})
    assert [timing.size for timing in report.timings] == [4 << 10, 1 << 20, 16 << 20]
    assert all(timing.seconds > 0 for timing in report.timings)


def test_a_bad_job_is_refused_before_anything_is_measured(mpctl: Mpctl) -> None:
    said = mpctl("doctor", "demo", "--tp", "3", "--json")
    assert said.code == 2
    assert said.issues


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_doctor_leaves_no_process(tmp_path: Path, number: int) -> None:
    """Nor a file, unless it is killed by -9."""
    command = [sys.executable, "-m", "mpctl", "doctor", "--run-dir", str(tmp_path)]
    with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_for(lambda: any(tmp_path.iterdir()), 30)
        wait_for(lambda: bool(psutil.Process(process.pid).children()), 30)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(30) == (143 if number == signal.SIGTERM else -number)
    assert psutil.wait_procs(children, timeout=10)[1] == []
    if number == signal.SIGTERM:
        assert list(tmp_path.iterdir()) == []
