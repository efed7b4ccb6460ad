"""The folder of a tuning: whose it is, and what a kill leaves."""

from __future__ import annotations

import json

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.tune.state import TrialRecord, TuneFolder
from mpctl.plan.planning.layout_settings import LayoutSettings
from tests.measure.tune.fakes import small_request


@pytest.fixture(scope="module")
def request_():
    return small_request()


def record(number, status="running", **changes):
    layout = LayoutSettings(dp=2)._asdict()
    return TrialRecord(number, layout, "the fastest by plan", 1.0, 1.0, 10, 5, 100.0, status, **changes)


def step_line(step, seconds, time):
    return (
        json.dumps(
            {"step": step, "loss": 1.0, "tokens": 1, "step_seconds": seconds, "tokens_per_second": 1.0, "time": time}
        )
        + "\n"
    )


def write_steps(folder, number, seconds):
    run = folder.run(number)
    run.path.mkdir(parents=True)
    lines = (step_line(n, s, 100.0 + 2 * n) for n, s in enumerate(seconds, 1))
    run.metrics.write_text("".join(lines))


def test_records_are_read_back(tmp_path):
    folder = TuneFolder(tmp_path / "t")
    trial = record(3, "measured", seconds=(3.0, 1.0, 1.0, 1.2, 1.1), wall=12.0)
    folder.save(trial)
    assert folder.records() == [trial]
    assert trial.step_seconds == 1.1 and trial.settings == LayoutSettings(dp=2)


def test_a_trial_of_too_few_steps_has_no_step_time():
    assert record(1, "measured", seconds=(1.0,) * 4).step_seconds is None


def test_the_same_job_in_another_layout_goes_on(tmp_path, request_):
    folder = TuneFolder(tmp_path / "t")
    folder.claim(request_.job, {})
    folder.claim(small_request(**{"training.steps": 7}).job, {})
    other = request_.job.model_copy(update={"parallel": request_.job.parallel.model_copy(update={"tp": 1, "zero": 1})})
    folder.claim(other, {})


@pytest.mark.parametrize(
    ("settings", "fixed", "said"),
    [
        ({"training.global_batch_size": 32}, {}, "training.global_batch_size 16 there, 32 here"),
        ({"model.layers": 2}, {}, "model.layers"),
        ({}, {"tp": 2}, "fixed.tp None there, 2 here"),
    ],
)
def test_a_folder_with_trials_of_another_job_is_refused(tmp_path, request_, settings, fixed, said):
    folder = TuneFolder(tmp_path / "t")
    folder.claim(request_.job, {})
    folder.save(record(1))
    for refuse in (folder.check, folder.claim):
        with pytest.raises(InputError, match="trials of another job") as caught:
            refuse(small_request(**settings).job, fixed)
        assert said in str(caught.value) and "name another folder" in str(caught.value)


def test_a_folder_without_trials_becomes_that_of_the_next_job(tmp_path, request_):
    folder = TuneFolder(tmp_path / "t")
    folder.claim(request_.job, {})
    prepared = folder.path / "data" / "manifest.json"
    prepared.parent.mkdir()
    prepared.touch()
    folder.claim(request_.job, {})
    assert prepared.exists()
    other = small_request(**{"model.layers": 2}).job
    folder.check(other, {"tp": 2})
    folder.claim(other, {"tp": 2})
    assert not prepared.exists()
    folder.save(record(1))
    with pytest.raises(InputError, match="trials of another job"):
        folder.check(request_.job, {})


def test_a_folder_of_other_files_is_refused(tmp_path, request_):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="no tuning made it"):
        TuneFolder(tmp_path).claim(request_.job, {})
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "mpctl.run/2"}'])
def test_a_folder_whose_file_cannot_be_read_is_refused(tmp_path, request_, text):
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(InputError, match=r"tuned\.json"):
        TuneFolder(tmp_path).claim(request_.job, {})


def test_a_record_that_cannot_be_read_is_named(tmp_path):
    folder = TuneFolder(tmp_path)
    folder.save(record(1))
    folder.record_path(1).write_text('{"number": 1}')
    with pytest.raises(InputError, match=r"001\.json.*remove the file"):
        folder.records()


def test_a_killed_trial_counts_where_it_made_enough_steps(tmp_path):
    folder = TuneFolder(tmp_path)
    for number, steps in ((1, 5), (2, 4), (3, 0)):
        folder.save(record(number))
        if steps:
            write_steps(folder, number, [1.0] * steps)
    assert [(r.status, r.wall) for r in folder.recovered()] == [
        ("measured", 10.0),
        ("interrupted", 8.0),
        ("interrupted", 0.0),
    ]
    assert folder.records() == folder.recovered()
