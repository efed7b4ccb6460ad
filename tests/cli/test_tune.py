"""`mpctl tune` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpctl.cli.tune import read_budget
from mpctl.errors import InputError
from mpctl.planning.plan import load_plan
from mpctl.spec.load import load_job
from mpctl.tune.document import tune_document
from mpctl.tune.state import TuneFolder
from tests.bench.small_jobs import small_settings, write_texts
from tests.cli.calls import Mpctl, Said, assert_refused
from tests.tune.fakes import Clock, FakeTarget, small_request, tuning_of
from tests.tune.test_state import record


def assert_told(said: Said, *words: str) -> None:
    """The command was refused in these words."""
    assert_refused(said, wants_json=False)
    assert all(word in said.err for word in words), said.err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("2 h", 7200.0),
        ("45", 45.0),
        ("0.5m", 30.0),
    ],
)
def test_a_budget_is_read(text: str, seconds: float) -> None:
    assert read_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5m", "five", "5m30", "5d", "99999h", "1e3"])
def test_a_budget_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--budget"):
        read_budget(text)


def test_a_budget_that_is_too_small_is_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    for budget in ("3s", "11s"):  # of which 10 s start the ranks
        said = mpctl("tune", "demo", "--ranks", 2, "--budget", budget, "--out", tmp_path / "t")
        assert_told(said, "tune-budget", "s are too short for one trial", "--budget")
        assert not (tmp_path / "t").exists()


def test_all_that_is_wrong_with_a_command_line_is_said_at_once(
    mpctl: Mpctl, tmp_path: Path
) -> None:
    wrong = ("--trials", 0, "--budget", "5d", "--fix", "tp", "--fix", "=2")
    said = mpctl("tune", "demo", "--ranks", 2, *wrong, "--out", tmp_path / "t", "--json")
    assert_refused(said, wants_json=True)
    found = [(issue["where"], issue["message"]) for issue in said.document["issues"]]
    assert [where for where, _ in found] == ["--budget", "--trials", "--fix", "--fix"]
    assert "'tp' is not KEY=VALUE" in found[2][1]
    short = mpctl("tune", "demo", "--ranks", 2, "--trials", 0, "--budget", "2s", "--json")
    assert set(short.issues) == {"bad-trials", "tune-budget"}
    short = mpctl("tune", "demo", "--runtime", "megatron-core", "--budget", "2s", "--json")
    assert set(short.issues) == {"tune-runtime", "tune-budget"}


def test_a_runtime_that_mpctl_does_not_launch_is_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("tune", "demo", "--runtime", "megatron-core", "--out", tmp_path / "t")
    assert_told(said, "tune-runtime", "megatron-core", "--emit")
    assert not (tmp_path / "t").exists()


def test_a_target_that_only_takes_submissions_is_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("tune", "demo", "--on", "kubernetes", "--out", tmp_path / "t")
    assert_told(said, "tune-target", "submitted jobs", "--emit LAUNCHER")
    assert not (tmp_path / "t").exists()


def test_a_job_without_a_model_is_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("tune", "--cluster", "this-machine", "--out", tmp_path / "t")
    assert_told(said, "no-model", "needs a model")


def test_ranks_and_nodes_contradict_each_other(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("tune", "demo", "--ranks", 2, "--nodes", 2, "--out", tmp_path / "t")
    assert_told(said, "usage", "--ranks 2 and --nodes", "one of them")


def test_a_folder_of_another_job_is_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    request, folder = small_request(), TuneFolder(tmp_path / "t")
    folder.claim(request.job, {})
    folder.save(record(1))
    said = mpctl("tune", "demo", "--ranks", 4, "--budget", "3s", "--out", folder.path)
    assert_told(said, "tune-other-job", "cluster.gpus_per_node 2 there, 4 here")


def test_what_a_folder_has_is_shown_without_a_trial(mpctl: Mpctl, tmp_path: Path) -> None:
    tuning = tuning_of(tmp_path / "t", small_request(), FakeTarget(lambda _: 1.0, Clock()))
    tuning.keep(record(1, "measured", seconds=(3.0, 1.0, 1.0, 1.2, 1.1)))
    tuning.update()
    document = tune_document(tuning, str)
    (tmp_path / "t" / "report.json").write_text(json.dumps(document))
    said = mpctl("tune", "--show", tmp_path / "t")
    assert said.code == 0 and "1 trial in" in said.out and "not ended" in said.out
    assert "1.10 s a step" in (tmp_path / "t" / "report.html").read_text()
    assert mpctl("tune", "--show", tmp_path / "t", "--json").document["best"]["file"]
    assert_told(mpctl("tune", "demo", "--show", tmp_path / "t"), "usage", "leave out JOB")
    assert_told(mpctl("tune", "--show", tmp_path), "no-tuning", "runs/tune-NAME")
    (tmp_path / "report.json").write_text("{}")
    assert_told(mpctl("tune", "--show", tmp_path), "no-tuning", "mpctl.tune/1")


@pytest.mark.slow
def test_a_small_tuning_runs_and_goes_on(mpctl: Mpctl, tmp_path: Path) -> None:
    """Two ranks of a narrow model: two trials, then one more in the same folder."""
    texts, out = tmp_path / "texts", tmp_path / "t"
    texts.mkdir()
    settings = {**small_settings(write_texts(texts)), "model.layers": 2}
    words = [w for k, v in settings.items() for w in ("--set", f"{k}={json.dumps(v)}")]
    line = ("tune", "demo", "--ranks", 2, *words, "--budget", "5m", "--out", out)
    first = mpctl(*line, "--trials", 2, "--json")
    assert first.code == 0, first.err
    found = first.document
    assert found["schema"] == "mpctl.tune/1" and found["ended"] == "trials"
    assert [trial["status"] for trial in found["trials"]] == ["measured"] * 2
    assert found["best"]["step_seconds"] == min(e["step_seconds"] for e in found["layouts"])
    assert "trials of" not in first.err and (out / "report.html").read_text().count("<h2") >= 3
    best = load_plan(str(out / "best.toml")).job
    assert best.world_size == 2 and best.model is not None and best.model.layers == 2
    assert load_job(str(out / "trials/001/job.json")).training.steps <= 12
    second = mpctl(*line, "--trials", 3)
    assert second.code == 0, second.err
    assert "3 trials" in second.out and "mpctl launch demo" in second.out
