"""Scaling cases and rows by hand, and one real bench of two worlds."""

import json

import pytest

from mpctl.bench.folder import check_folder, save_report, take_folder
from mpctl.bench.report import load_warnings
from mpctl.bench.runner import CaseRun
from mpctl.bench.scaling import Case, parse_worlds, scaling_cases, scaling_rows, timing_of
from mpctl.cli.app import run
from mpctl.errors import InputError
from mpctl.render.bench import print_scaling
from mpctl.rundir.directory import RunDir
from mpctl.rundir.marker import write_marker
from mpctl.spec.load import load_job
from tests.bench.small_jobs import planned_case, small_settings, step_records


def job(**overrides):
    settings = {"parallel.tp": 2, "training.global_batch_size": 16}
    return load_job(None, {**settings, **overrides})


def test_the_smallest_world_is_one_case_for_both_modes():
    cases = scaling_cases(job(), [1, 2, 4], along="job", modes=("strong", "weak"))
    assert [(c.world, c.tp, c.dp, c.global_batch_size, c.modes) for c in cases] == [
        (1, 1, 1, 16, ("strong", "weak")),
        (2, 2, 1, 16, ("strong",)),
        (2, 2, 1, 32, ("weak",)),
        (4, 2, 2, 16, ("strong",)),
        (4, 2, 2, 64, ("weak",)),
    ]


@pytest.mark.parametrize(("along", "layout"), [("tp", (4, 1)), ("dp", (1, 4)), ("job", (2, 2))])
def test_along_says_which_axis_takes_the_ranks(along, layout):
    (case,) = scaling_cases(job(), [4], along=along, modes=("strong",))
    assert (case.tp, case.dp) == layout


@pytest.mark.parametrize("text", ["", "1,,2", "0", "two", "1,-2"])
def test_bad_worlds_are_refused(text):
    with pytest.raises(InputError, match="--world"):
        parse_worlds(text)


def ran(*rounds, predicted=None):
    """The runs of a case of 100 tokens a step, from the seconds of its steps in each round."""
    case = planned_case(tokens=100, predicted=predicted)
    return [
        CaseRun(case, number, RunDir("out"), step_records(seconds), [], {})
        for number, seconds in enumerate(rounds)
    ]


def test_rows_by_hand():
    """100 tokens a step: 1 s on one rank, 0.625 s on two: 1.6 times, 80 %."""
    one = Case(1, 1, 1, 16, ("strong",))
    two = Case(2, 2, 1, 16, ("strong",))
    timings = [
        timing_of(one, ran([9, 9, 1.0, 1.1], [9, 9, 0.9, 1.0])),
        timing_of(two, ran([9, 9, 0.625], predicted=0.5)),
    ]
    first, second = scaling_rows(timings, "strong")
    assert first["tokens_per_second"] == pytest.approx(100)
    assert second["speed_up"] == pytest.approx(1.6)
    assert second["efficiency"] == pytest.approx(0.8)
    assert second["predicted_seconds"] == 0.5


def bench(texts, out, *more):
    sets = [f"{key}={json.dumps(value)}" for key, value in small_settings(texts).items()]
    flags = [flag for setting in sets for flag in ("--set", setting)]
    return ["bench", "scaling", "demo", *flags, "--out", str(out), "--json", *more]


@pytest.mark.slow
def test_a_real_bench_of_two_worlds(texts, tmp_path, capfd):
    code = run(bench(texts, tmp_path / "out", "--world", "1,2", "--mode", "strong", "--steps", "4"))
    captured = capfd.readouterr()
    assert code == 0, captured.err
    report = json.loads(captured.out)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["world_size"] for row in report["results"]] == [1, 2]
    assert report["results"][0]["efficiency"] == 1
    assert all(row["tokens_per_second"] > 0 for row in report["results"])
    assert not (tmp_path / "out" / "strong-1-r1" / "checkpoints").exists()
    assert (tmp_path / "out" / ".mpctl-bench").exists()
    again = bench(texts, tmp_path / "out", "--world", "1,2", "--steps", "4")
    assert run(again) == 2  # the first report stays
    assert "--overwrite" in json.loads(capfd.readouterr().out)["issues"][0]["hint"]
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())


def report(**more):
    where = {"load_at_start": 0.5, "cores": 2, "gpus": 0, "torch": "2", "date": "today", **more}
    return {"schema": "mpctl.bench/1", "results": [], "findings": {"steps_timed": 3},
            "environment": where}  # fmt: skip


def made(out):
    """A bench's folder: report, data, the run of a case, and a file of the user's."""
    case = out / "strong-1-r1"
    (case / "logs").mkdir(parents=True)
    write_marker(case)
    (out / "data").mkdir()
    for path in (out / "data/data.json", case / "metrics.jsonl", out / "notes.txt"):
        path.write_text("{}")
    save_report(out, report())
    return out


def test_an_earlier_bench_is_replaced_only_when_asked(tmp_path):
    out = made(tmp_path / "out")
    (issue,) = check_folder(out, overwrite=False)
    assert "a bench's report" in issue.message
    assert list(check_folder(out, overwrite=True)) == []
    take_folder(out)
    assert sorted(path.name for path in out.iterdir()) == [".mpctl-bench", "notes.txt"]
    assert list(check_folder(out, overwrite=True)) == []  # as one that Ctrl-C ended leaves it
    assert list(check_folder(tmp_path / "new", overwrite=False)) == []


def test_overwrite_removes_nothing_of_others(tmp_path):
    out = made(tmp_path / "out")
    (out / "report.json").unlink()
    (issue,) = check_folder(out, overwrite=True)
    assert issue.rule == "bench-foreign" and (out / "data/data.json").exists()
    save_report(out, report())
    (out / "strong-1-r1/.mpctl-run").unlink()  # now a folder of the user's that is called so
    take_folder(out)
    assert (out / "strong-1-r1/metrics.jsonl").exists()


def test_a_load_above_the_cores_is_said(capsys):
    assert load_warnings({"load_at_start": 2.0, "cores": 2}) == []
    (words,) = load_warnings({"load_at_start": 7.84, "cores": 2})
    assert "the load average is 7.8 on 2 cores" in words
    print_scaling(report(load_at_start=7.84))
    assert "the load average is 7.8 on 2 cores" in " ".join(capsys.readouterr().out.split())


def test_every_bad_case_is_named_before_any_run(texts, tmp_path, capfd):
    """Two heads do not divide by 4 ranks, the batch of 16 not by 5 replicas."""
    out = tmp_path / "out"
    assert run(bench(texts, out, "--world", "1,4,5", "--along", "tp")) == 2
    rules = {issue["rule"] for issue in json.loads(capfd.readouterr().out)["issues"]}
    assert {"tp-divides-heads"} <= rules
    assert not out.exists()
