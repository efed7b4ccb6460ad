"""`mpctl bench scaling` as it is typed: what it refuses, and real benches."""

import json
import signal
import subprocess
import sys
import time

import pytest

from mpctl.cli.app import run
from tests.measure.bench.small_jobs import small_settings
from tests.started import started


def bench(texts, out, *more):
    sets = [f"{key}={json.dumps(value)}" for key, value in small_settings(texts).items()]
    flags = [flag for setting in sets for flag in ("--set", setting)]
    return ["bench", "scaling", "demo", *flags, "--out", str(out), "--json", *more]


@pytest.mark.slow
def test_a_real_bench_of_two_worlds_in_two_rounds(texts, tmp_path, capfd):
    out = tmp_path / "out"
    words = ["--world", "1,2", "--mode", "strong", "--steps", "4", "--rounds", "2"]
    code = run(bench(texts, out, *words))
    captured = capfd.readouterr()
    assert code == 0, captured.err
    report = json.loads(captured.out)
    assert report == json.loads((out / "report.json").read_text()) and report["is_complete"]
    one, two = report["results"]
    assert (one["layout"], two["layout"]) == ("1 rank", "tp2")
    assert one["efficiency"] == 1 and one["rounds"] == two["rounds"] == 2
    assert one["tokens_per_second"] > 0 and 0 < two["mfu"] < 1
    assert one["communication_share"] == 0 < two["communication_share"] < 1
    assert not (out / "strong-tp2-r2" / "checkpoints").exists()
    assert "strong tp2, round 2 of 2" in captured.err  # what is done now, without a terminal
    assert run(bench(texts, out, *words)) == 2  # the first report stays
    assert "--overwrite" in json.loads(capfd.readouterr().out)["issues"][0]["hint"]
    assert report == json.loads((out / "report.json").read_text())


@pytest.mark.slow
def test_ctrl_c_keeps_the_runs_that_ended(texts, tmp_path):
    out = tmp_path / "out"
    words = bench(texts, out, "--world", "1,2", "--mode", "strong", "--steps", "400")
    command = [sys.executable, "-m", "mpctl", *words]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not (out / "strong-tp2-r1" / "metrics.jsonl").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    report = json.loads(printed)
    assert report == json.loads((out / "report.json").read_text())
    assert not report["is_complete"] and [row["layout"] for row in report["results"]] == ["1 rank"]


def refused(texts, tmp_path, capfd, *words):
    """The issues of a bench that does not begin."""
    out = tmp_path / "out"
    assert run(bench(texts, out, *words)) == 2
    assert not out.exists()
    return json.loads(capfd.readouterr().out)["issues"]


def test_every_bad_case_is_named_before_any_run(texts, tmp_path, capfd):
    """Two heads do not divide by 4 ranks, one layer makes no two stages."""
    issues = refused(texts, tmp_path, capfd, "--layouts", "tp=1,4", "pp=1,2")
    rules = {issue["rule"] for issue in issues}
    assert {"tp-divides-heads", "layers-per-stage"} <= rules


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--world", "1,2", "--rounds", "0"], "command line"),
        (["--world", "two"], "--world"),
        (["--world", "2"], "--world"),
        (["--layouts", "tp=1,x"], "--layouts"),
        (["--layouts", "tp=1"], "--layouts"),
        (["--layouts", "tp=1,2", "foo=1"], "--layouts"),
        (["--layouts", "tp=1,2", "--along", "tp"], "--along"),
        (["--layouts", "tp=2", "--world", "1,2"], "--world"),
        (["--budget", "-1"], "--budget"),
        (["tp=1,2"], "JOB"),
        (["--layouts", "tp=1,2", "demo-llama"], "JOB"),
    ],
)
def test_what_names_no_cases_is_refused(texts, tmp_path, capfd, words, where):
    assert {issue["where"] for issue in refused(texts, tmp_path, capfd, *words)} == {where}


def test_a_folder_of_others_is_refused(texts, tmp_path, capfd):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert run(bench(texts, tmp_path / "out", "--overwrite")) == 2
    (issue,) = json.loads(capfd.readouterr().out)["issues"]
    assert issue["rule"] == "bench-foreign" and (tmp_path / "out" / "notes.txt").exists()
