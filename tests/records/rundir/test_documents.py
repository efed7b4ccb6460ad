"""The documents of a run directory are read back as written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.metrics import REQUIRED, parse_record, read_key_records
from mpctl.records.rundir.rank_files import FailureRecord, StepRecord
from mpctl.records.rundir.summary import FAILURE, Failure, OtherFailure, RankSummary, RunSummary, training_progress
from mpctl.train.runtime.process import failure_record


def test_a_failure_is_read_back_as_it_was_written() -> None:
    other = OtherFailure((0, 2), "Connection closed by peer", is_echo=True)
    failure = Failure(1, "x", {"tp": 1}, "step 3", "log", ("a",), "n2", (other,), "n2", would_repeat=True)
    written = failure.as_dict()
    assert set(written) == {"rank", "host", "coords", "error", "doing", "log", "last_lines", "others", "blamed"}
    assert FAILURE.validate_python(json.loads(json.dumps(written))) == replace(failure, would_repeat=False)


def test_a_record_needs_its_required_keys_and_no_others() -> None:
    record = dict.fromkeys(REQUIRED, 1)
    assert parse_record(json.dumps(record).encode()) == record
    assert set(REQUIRED) < set(StepRecord.__annotations__)
    for key in REQUIRED:
        assert parse_record(json.dumps({**record, key: None}).encode()) is None


def test_a_failure_record_has_the_keys_of_its_type() -> None:
    record = failure_record(ValueError("x"), rank=1, coords={"tp": 1}, doing="step 3")
    assert set(FailureRecord.__annotations__) - set(record) == {"rollback", "damaged"}
    assert record["error"] == "ValueError: x"


def test_a_run_of_0_1_0_has_the_keys_of_today() -> None:
    """It was written before the types existed."""
    run = RunDir(Path(__file__).parents[2] / "recorded/run-0.1.0/run")
    summary = json.loads(run.summary.read_text())
    later = {"saves", "communication_seconds", "mfu", "hfu", "experts", "goodput", "slow", "program", "figures_from"}
    assert set(RunSummary.__annotations__) - set(summary) == later
    assert summary["plan_beside_run"]
    for rank in summary["plan_beside_run"]:
        assert set(RankSummary.__annotations__) - set(rank) == {"reserved_memory_bytes", "device"}
    records = list(run.records())
    assert records and all(set(record) <= set(StepRecord.__annotations__) for record in records)


def test_steps_of_an_earlier_layout_are_not_compared_with_the_last_forecast() -> None:
    """By hand: steps of 5 s, forecast 5, then a resumption forecast at 1 whose first two steps
    warm up: the median of 1, 3 and 2 s."""
    steps = [(5.0, 5.0)] * 20 + [(9.0, 1.0), (8.0, 1.0), (1.0, 1.0), (3.0, 1.0), (2.0, 1.0)]
    records: list[StepRecord] = [
        {
            "step": n,
            "loss": 1.0,
            "tokens": n,
            "step_seconds": seconds,
            "cpu_seconds": 0.0,
            "tokens_per_second": 6 / seconds,
            "predicted_step_seconds": forecast,
        }
        for n, (seconds, forecast) in enumerate(steps, 1)
    ]
    progress = training_progress(records)
    assert (progress["step_seconds"], progress["tokens_per_second"]) == (2.0, 3.0)
    assert training_progress(records[:20])["step_seconds"] == 5.0


def test_progress_without_records_and_with_some(tmp_path: Path) -> None:
    empty = training_progress([])
    assert (empty["steps"], empty["final_loss"], empty["step_seconds"]) == (0, None, None)
    assert empty["communication_seconds"] is None
    lines = [
        {
            "step": n,
            "loss": 5.0 - n,
            "tokens": 10 * n,
            "step_seconds": seconds,
            "tokens_per_second": 10 / seconds,
            **({"validation_loss": 4.0} if n == 2 else {}),
            **({"communication_seconds": {"tp": seconds / 2}} if n > 3 else {}),
        }
        for n, seconds in ((1, 9.0), (2, 8.0), (3, 1.0), (4, 3.0), (5, 2.0))
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    progress = training_progress(list(RunDir(tmp_path).records()))
    assert (progress["steps"], progress["tokens"], progress["final_loss"]) == (5, 50, 0.0)
    assert progress["step_seconds"] == 2.0  # the median without the first two steps
    assert progress["communication_seconds"] == {"tp": 1.25}  # of the two that have it
    assert progress["validation_loss"] == 4.0
    key_records = read_key_records(path)
    assert key_records.validated is not None and key_records.validated["step"] == 2
