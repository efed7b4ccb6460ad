"""A rank that fails inside a pipeline's schedule ends the job with its place and with what it was
at; no other rank is left waiting."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil
import pytest

from mpctl.records.rundir.breadcrumb import rank_memory, read_breadcrumb
from mpctl.run.launch.attempt import AttemptPhase
from mpctl.run.launch.status_file import read_status
from tests.run.launch.command import Launched, endless, launch, poison

INSIDE = re.compile(r"step \d+, stage (\d), (forward|backward)[ a-z]* of micro batch \d+")
PATIENCE = 4  # seconds for a collective


def begin(data: Path, run_dir: Path, *flags: str, ranks: int = 2) -> Launched:
    """Steps of 64 micro batches."""
    sets = (f"cluster.gpus_per_node={ranks}", f"launch.timeout_seconds={PATIENCE}", "training.global_batch_size=128")
    return endless(data, run_dir, *flags, *(part for one in sets for part in ("--set", one)))


def breadcrumb_of(worker: psutil.Process, rank: int) -> str:
    """What a rank is doing, as its launcher reads it."""
    return read_breadcrumb(bytes(rank_memory(rank, worker.environ()))).doing


def suspend_inside(run: Launched, rank: int) -> tuple[psutil.Process, str]:
    """Stop a rank that is inside its schedule; returns what it is doing."""
    worker, deadline = run.at_step(1).worker(rank), time.monotonic() + 20
    while time.monotonic() < deadline:
        worker.suspend()
        doing = breadcrumb_of(worker, rank)
        if INSIDE.match(doing):
            return worker, doing
        worker.resume()
        time.sleep(0.01)
    raise AssertionError(doing)


def check_ended(run: Launched, rank: int, doing: str, *, ranks: int = 2) -> str:
    """That the job failed by this rank, and by it alone; the error."""
    run.ended(PATIENCE + 12)
    summary, failure = run.summary, run.summary["failure"]
    assert (run.process.returncode, summary["status"]) == (1, "failed")
    assert (failure["rank"], failure["doing"]) == (rank, doing)
    stage = int(INSIDE.match(doing)[1])  # type: ignore[index]
    assert failure["coords"] == {"tp": rank % (ranks // 2), "cp": 0, "dp": 0, "pp": stage}
    place = ", ".join(f"{axis} {index}" for axis, index in failure["coords"].items())
    assert f"rank {rank} ({place}) failed at {doing}" in " ".join(run.stderr.split())
    report = read_status(run.run_dir / "nodes/status.json")
    assert report is not None and report.phase in (AttemptPhase.FAILED, AttemptPhase.ENDED)
    left = [record for record in report.state.failures if record["rank"] != rank]
    assert all(record["is_echo"] for record in left), left
    assert not run.left_behind(3)
    return str(failure["error"])


SLOW = pytest.mark.slow
CASES = [
    (("--pp", "2", "--vpp", "2"), 2, 1),
    pytest.param(("--pp", "2"), 2, 0, marks=SLOW),
    pytest.param(("--pp", "2", "--set", "parallel.schedule=zero-bubble"), 2, 1, marks=SLOW),
    pytest.param(("--pp", "2", "--tp", "2"), 4, 2, marks=SLOW),
]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "ranks", "rank"), CASES)
def test_a_rank_killed_inside_a_step_is_named_with_its_micro_batch(
    data: Path, tmp_path: Path, flags: tuple[str, ...], ranks: int, rank: int
) -> None:
    layers = ("--set", "model.layers=4")
    run = begin(data, tmp_path / "run", *flags, *layers, ranks=ranks)
    worker, doing = suspend_inside(run, rank)
    worker.kill()
    assert "SIGKILL" in check_ended(run, rank, doing, ranks=ranks)
    assert (" in chunk " in doing) == ("--vpp" in flags)


@SLOW
@pytest.mark.parametrize(("flags", "ranks", "rank"), [(("--pp", "2"), 2, 1), (("--pp", "2", "--tp", "2"), 4, 3)])
def test_a_rank_stopped_inside_a_step_is_named_with_its_micro_batch(
    data: Path, tmp_path: Path, flags: tuple[str, ...], ranks: int, rank: int
) -> None:
    run = begin(data, tmp_path / "run", *flags, ranks=ranks)
    _, doing = suspend_inside(run, rank)
    assert "SIGSTOP" in check_ended(run, rank, doing, ranks=ranks)


@SLOW
@pytest.mark.parametrize("vpp", [1, 2])
def test_a_rank_that_raises_in_a_micro_batch_names_it(data: Path, tmp_path: Path, vpp: int) -> None:
    """Both stages read the sample: the first to meet it is blamed, and both know where."""
    step = poison(data, tmp_path / "data", dp_rank=0, dp=1, micro_batch=2)
    sets = ("cluster.gpus_per_node=2", "model.layers=4", f"parallel.vpp={vpp}")
    run = launch(
        tmp_path / "data", tmp_path / "run", "--pp", "2", *(part for one in sets for part in ("--set", one))
    ).ended()
    rank = run.summary["failure"]["rank"]
    chunk = " in chunk 0" if vpp > 1 else ""
    doing = f"step {step}, stage {rank}, forward of micro batch 2{chunk}"
    assert run.summary["failure"]["doing"] == doing and run.process.returncode == 1
    assert "token 60000" in run.summary["failure"]["error"] and not run.left_behind(3)
    assert run.records[-1]["step"] == step - 1
