"""One host measured for real, and probes that fail, hang or crash."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import mpctl
from mpctl.doctor.documents import HostReport, Limits, TorchFacts
from mpctl.doctor.hardware import cpu_quota, probe_limits
from mpctl.doctor.hosts import NoAnswer, run_here
from mpctl.doctor.probe import RunningProbe
from mpctl.doctor.requests import ProbeRequest
from mpctl.doctor.software import probe_torch, relevant_variables
from tests.doctor.synthetic import answer


@pytest.mark.slow
def test_this_host(tmp_path: Path) -> None:
    """The whole process, torch and two processes over the loopback included."""
    request = ProbeRequest(run_dir=str(tmp_path / "run"))
    report = run_here("mpctl.doctor.probe", request.model_dump_json(), 60).read(HostReport)
    assert report.failures == []
    assert report.software and report.software.mpctl == mpctl.__version__
    assert report.software.executable == sys.executable
    assert report.torch and report.torch.version == torch.__version__
    assert report.torch.has_gloo and report.torch.gloo_error is None
    assert report.processor and report.processor.logical == psutil.cpu_count()
    assert report.memory and 0 < report.memory.free <= report.memory.total
    assert report.loopback and report.loopback.rate and report.loopback.rate > 1e6
    assert report.folder and report.folder.probed == str(tmp_path)
    assert abs(report.unix_time - time.time()) < 60
    assert set(report.seconds) == {
        "processor", "software", "memory", "limits", "gpus", "network", "folder", "torch",
        "loopback",
    }  # fmt: skip


def test_a_probe_that_hangs_is_given_up() -> None:
    probe = RunningProbe("slow", lambda: time.sleep(30) or Limits(), 0.1).start()  # type: ignore
    began = time.monotonic()
    probe.wait()
    assert time.monotonic() - began < 20
    assert probe.error == "no answer within 0.1 s"


def test_a_probe_that_fails_says_why() -> None:
    def fail() -> Limits:
        raise PermissionError(13, "Permission denied", "/proc")

    probe = RunningProbe("broken", fail, 5).start()
    probe.wait()
    assert probe.result is None
    assert probe.error is not None and "Permission denied" in probe.error


@pytest.mark.parametrize(
    ("body", "seconds", "words"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", 60.0, "libcudart"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60.0, "ended by signal 11"),
        ("import time; time.sleep(30)", 1.5, "no answer within 1.5 s"),
    ],
    ids=["import fails", "crashes", "hangs"],
)
def test_a_torch_that_cannot_be_used_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, seconds: float, words: str
) -> None:
    (tmp_path / "torch.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=words):
        probe_torch(seconds)


def test_answers_that_are_none() -> None:
    for given, words in (
        (answer("", code=None, errors="no answer within 3 s"), "no answer within 3 s"),
        (answer("", code=1, errors="Traceback\nNo module named mpctl\n"), "No module named mpctl"),
        (answer("", code=-9), "exit code -9"),
        (answer('{"host": 3}'), "another form"),
    ):
        with pytest.raises(NoAnswer, match=words):
            given.read(HostReport)


def test_keys_of_a_newer_version_are_ignored() -> None:
    facts = answer('noise\n{"host": "n1", "unix_time": 1.0, "invented": []}')
    assert facts.read(HostReport).host == "n1"


def test_the_torch_process_and_its_model_agree() -> None:
    """runtime/ cannot import the model, so that both list the keys."""
    from mpctl.runtime.probes.torch_report import TorchReport

    assert set(TorchReport.__annotations__) == set(TorchFacts.model_fields)


def test_only_variables_that_change_runs_are_reported() -> None:
    environment = {"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x", "OMP_NUM_THREADS": "4"}
    assert list(relevant_variables(environment)) == ["NCCL_DEBUG", "OMP_NUM_THREADS"]


def test_the_quota_of_a_control_group() -> None:
    assert cpu_quota("150000 100000\n") == 1.5
    assert cpu_quota("max 100000\n") is None
    assert cpu_quota("") is None


def test_limits_are_those_of_this_process() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = probe_limits()
    assert limits.open_files == (None if soft == resource.RLIM_INFINITY else soft)
    assert limits.open_files_hard == (None if hard == resource.RLIM_INFINITY else hard)
