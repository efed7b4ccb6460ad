"""Ranks that keep the others waiting in a real run: who is named, with which collective, when."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.run.launch.command import Launched, endless

SPIN = """
import signal
def spin(number, frame):
    while frame is not None:  # not inside of a collective: 1 ms later
        if "transport" in frame.f_code.co_filename:
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
            return
        frame = frame.f_back
    while True:
        pass
signal.signal(signal.SIGWINCH, spin)
signal.signal(signal.SIGALRM, spin)
"""
LIMIT = 15.0  # the first step imports and compiles: seconds, on a machine that does much else


@pytest.fixture
def spinning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGWINCH makes a rank compute for ever."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SPIN)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def hung(data: Path, folder: Path, rank: int, *more: str) -> tuple[Launched, float]:
    """A run in which a rank computes for ever from step 2 on, and how long it took to end."""
    limit = ("--set", f"launch.timeout_seconds={LIMIT}")
    run = endless(data, folder / "run", *limit, *more).at_step(2)
    began = time.monotonic()
    run.worker(rank).send_signal(signal.SIGWINCH)
    run.ended()
    return run, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.usefixtures("spinning")
def test_a_rank_that_computes_for_ever_is_named(data: Path, tmp_path: Path) -> None:
    run, seconds = hung(data, tmp_path, 1, "--tp", "2")
    assert run.process.returncode == 1 and not run.left_behind(3)
    failure = run.summary["failure"]
    assert failure["rank"] == 1
    assert failure["error"].startswith("did not join ") and "(ranks 0-1)" in failure["error"]
    assert "in which rank 0 has waited for 15 s: it computes; it is at " in failure["error"]
    assert "sitecustomize.py:9 in spin" in failure["error"]
    print(f"ended {seconds:.2f} s after it began to compute, the limit is {LIMIT:g} s")
    assert LIMIT < seconds < LIMIT + 10  # a machine that does much else, and ending the ranks


@pytest.mark.slow
@pytest.mark.usefixtures("spinning")
@pytest.mark.parametrize("transport", ["true", "false"])
def test_the_rank_at_the_end_of_the_chain_is_named(data: Path, tmp_path: Path, transport: str) -> None:
    """tp 2, pp 2: rank 3 holds up 2 in tp, and 2 and 3 hold up the first stage; through shared
    memory and through gloo."""
    layout = ("--set", "parallel.pp=2", "--set", "cluster.gpus_per_node=4", "--tp", "2")
    run, _ = hung(data, tmp_path, 3, *layout, "--set", f"launch.shared_memory={transport}")
    assert run.summary["failure"]["rank"] == 3
    assert "sitecustomize.py:9 in spin" in run.summary["failure"]["error"]


@pytest.mark.slow
def test_a_stopped_rank_is_distinguished_from_one_that_computes(data: Path, tmp_path: Path) -> None:
    run = endless(data, tmp_path / "run", "--tp", "2").at_step(2)
    run.worker(1).suspend()
    run.ended()  # within seconds, though its peer would wait 300 s for it
    assert run.process.returncode == 1 and run.summary["failure"]["rank"] == 1
    assert "stopped (SIGSTOP" in run.stderr and not run.left_behind()
    error = run.summary["failure"]["error"]
    assert error.startswith("its process is stopped (SIGSTOP, or a debugger); it did not join ")
    assert error.endswith("(ranks 0-1), in which rank 0 waits")
