"""Ranks that are forked from a torchrun that has imported torch, and the one that waits for an
attempt: real runs whose ranks, waiting process or launcher are killed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.run.launch.command import Launched, launch, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")]
STEPS = 60
FORKED, ANEW = "forked from torchrun, which had imported torch", "started anew"


def run(data: Path, path: Path, **settings: object) -> Launched:
    """tp 2, with a checkpoint every 20 steps and one restart."""
    given = {
        "training.steps": STEPS,
        "training.eval_samples": 0,
        "checkpoint.interval": 20,
        "launch.max_restarts": 1,
        **{k.replace("__", "."): v for k, v in settings.items()},
    }
    sets = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    return launch(data, path, "--tp", "2", *(part for one in sets for part in ("--set", one)))


def waiting(run: Launched) -> list[psutil.Process]:
    """The processes that wait for an attempt."""
    children = psutil.Process(run.process.pid).children()
    return [child for child in children if "--waiting" in child.cmdline()]


def starts(run: Launched, rank: int) -> list[str]:
    """How each process of a rank began, by its log."""
    lines = (run.run_dir / f"logs/rank-{rank}.log").read_text().splitlines()
    return [line for line in lines if line in (FORKED, ANEW)]


def environments(run: Launched) -> list[dict[str, str]]:
    """The environment of each rank, without what differs from run to run."""
    own = ("PORT", "BREADCRUMBS", "MPCTL_TORCHRUN", "ERROR_FILE", "SHA256", "TEMP_FILE", "TEST")
    found = []
    for rank in (0, 1):
        given = run.worker(rank).environ()
        found.append({k: "" if k.endswith(own) else v for k, v in given.items()})
    return found


@pytest.fixture(scope="module")
def cold(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[dict]]:
    """The losses of an undisturbed run of new processes, and the environments of its ranks."""
    one = run(data, tmp_path_factory.mktemp("cold") / "run", launch__warm_start=False).at_step(3)
    seen = environments(one)
    assert one.ended().process.returncode == 0, one.stderr
    assert starts(one, 0) == starts(one, 1) == [ANEW]
    return one.losses, seen


def test_the_next_attempt_is_forked_from_the_process_that_waits(
    data: Path, tmp_path: Path, cold: tuple[list[float], list[dict]]
) -> None:
    losses, seen = cold
    one = run(data, tmp_path / "run").at_step(2)
    (spare,) = wait_for(lambda: waiting(one))
    one.remember()
    assert environments(one) == seen
    one.worker(1).kill()
    wait_for(lambda: len(starts(one, 0)) == 2)
    assert "--max-restarts=0" in spare.cmdline()  # it is the torchrun of this attempt now
    one.remember()
    assert one.ended().process.returncode == 0, one.stderr
    assert "rank 1" in one.stderr and "killed by signal 9" in one.stderr
    assert starts(one, 0) == starts(one, 1) == [FORKED, FORKED]
    assert one.losses == losses
    assert not one.left_behind(10)


def test_without_the_process_that_waits_the_run_goes_on(
    data: Path, tmp_path: Path, cold: tuple[list[float], list[dict]]
) -> None:
    one = run(data, tmp_path / "run").at_step(2)
    (spare,) = wait_for(lambda: waiting(one))
    one.remember()
    victim = one.worker(0)
    spare.kill()
    victim.send_signal(signal.SIGSEGV)
    assert one.ended().process.returncode == 0, one.stderr
    assert "killed by signal 11" in one.stderr
    assert one.summary["attempts"] == 2 and one.losses == cold[0]


def test_nothing_is_left_of_a_killed_launcher(data: Path, tmp_path: Path) -> None:
    one = run(data, tmp_path / "run", training__steps=100_000).at_step(2)
    wait_for(lambda: waiting(one))
    one.remember()
    lines = [process.cmdline() for process in one.family.values()]
    modules = sorted(line[line.index("-m") + 1] for line in lines)
    assert modules == ["mpctl.train.runtime.torchrun"] * 2 + ["mpctl.train.runtime.worker"] * 2
    one.process.kill()
    assert not one.left_behind(10)


def test_a_run_that_is_not_restarted_keeps_no_process(data: Path, tmp_path: Path) -> None:
    one = run(data, tmp_path / "run", launch__max_restarts=0).at_step(STEPS // 2)
    assert not waiting(one)
    assert one.ended().process.returncode == 0


THREAD = """
import sys, threading, time
if "mpctl.train.runtime.torchrun" in sys.orig_argv:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


def test_a_process_with_another_thread_is_not_copied(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(THREAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    one = run(data, tmp_path / "run", training__steps=3).ended()
    assert one.process.returncode == 0, one.stderr
    log = (one.run_dir / "logs/torchrun.log").read_text()
    assert "ranks are new processes and import torch again: this process has 2 threads" in log
    assert starts(one, 0) == [ANEW]


IMPORTED = """
import atexit, os, sys

def note():
    before = set(sys.modules)
    def write():
        with open(f"{os.environ['NOTES']}/{os.environ['RANK']}", "w") as stream:
            stream.write("\\n".join(set(sys.modules) - before))
    atexit.register(write)

if "mpctl.train.runtime.torchrun" in sys.orig_argv:
    os.register_at_fork(after_in_child=note)
"""


def test_a_forked_rank_imports_next_to_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports itself, every rank does once more, and at every restart."""
    (tmp_path / "sitecustomize.py").write_text(IMPORTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("NOTES", str(tmp_path))
    assert run(data, tmp_path / "run", training__steps=3).ended().process.returncode == 0
    imported = [(tmp_path / rank).read_text().split("\n") for rank in "01"]
    assert [len(names) < 15 for names in imported] == [True, True], imported
