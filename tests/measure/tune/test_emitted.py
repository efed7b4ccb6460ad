"""Trials that another launcher makes: files written, logs read back."""

from __future__ import annotations

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.tune.emitted import STEPS, expressible, take_turn
from mpctl.measure.tune.loop import TuneLimits, TuneWatch, Tuning
from mpctl.measure.tune.state import TuneFolder
from mpctl.plan.search.request import read_request
from tests.interop.example_logs import megatron

JOB = {
    "cluster": "selene",
    "cluster.nodes": 2,
    "model": "gpt2-medium",
    "parallel.cp": 1,
    "training.global_batch_size": 32,
    "training.runtime": "megatron-core",
    "training.dtype": "bf16",
    "parallel.zero": 1,
    "training.recompute": "none",
    "training.micro_batch_size": 2,
    "parallel.vpp": 1,
    "parallel.order": "tp-cp-dp-pp",
    "parallel.sequence_parallel": False,
}


@pytest.fixture(scope="module")
def request_():
    return read_request(None, JOB, [], {})


def turn(path, request_, events, trials=8):
    watch = TuneWatch(on_event=events.append)
    tuning = Tuning(
        request_,
        TuneFolder(path),
        _never,
        TuneLimits(1e6, trials),
        watch=watch,
        accepts=expressible(request_, "megatron"),
    )
    return tuning, take_turn(tuning, "megatron")


def _never(order, watch):
    raise AssertionError("another launcher makes the trials")


def log_of(seconds):
    """Megatron-LM's log of a trial."""
    return megatron([seconds] * STEPS, batch=32)


def test_trials_are_written_and_read_back_from_logs(tmp_path, request_):
    events: list[str] = []
    tuning, files = turn(tmp_path / "t", request_, events)
    assert tuning.ended == "waiting" and len(files) == 3
    assert len({record.settings for record in tuning.records}) == 3
    assert f"--train-iters {STEPS}" in files[0].read_text()
    files[0].with_suffix(".log").write_text(log_of(2.0))
    files[1].with_suffix(".log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried\n")
    files[2].with_suffix(".log").write_text(log_of(2e-4))  # no step of this job takes 0.2 ms
    waits, left = turn(tmp_path / "t", request_, events)
    assert waits.ended == "waiting" and left == files[2:]
    assert ["003.log" in event for event in events] == [True]
    assert "the plan is" in events[0]

    files[2].with_suffix(".log").write_text(log_of(2.5))
    last, new = turn(tmp_path / "t", request_, events)
    states = [record.status for record in last.records]
    assert states[:3] == ["measured", "out-of-memory", "measured"]
    assert [record.step_seconds for record in last.records[:3]] == [2.0, None, 2.5]
    assert last.best == last.records[0].settings
    assert all(path.name > "003" for path in new)
    ran, limit = {record.settings for record in last.records[:3:2]}, last.records[1].planned_bytes
    assert all(r.settings in ran or r.planned_bytes < limit for r in last.records[3:])


@pytest.mark.slow
def test_the_number_of_trials_is_kept(tmp_path, request_):
    tuning, files = turn(tmp_path / "t", request_, [], trials=2)
    assert len(files) == 2
    for path in files:
        path.with_suffix(".log").write_text(log_of(2.0))
    tuning, files = turn(tmp_path / "t", request_, [], trials=2)
    assert files == [] and tuning.ended == "trials"


def test_an_unknown_launcher_is_refused(request_):
    with pytest.raises(InputError, match=r"slurp.*megatron"):
        expressible(request_, "slurp")
