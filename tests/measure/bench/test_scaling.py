"""Cases, rows and efficiency of a scaling bench by hand."""

from pathlib import Path

import pytest

from mpctl.measure.bench.layouts import job_layouts, parse_layouts
from mpctl.measure.bench.runner import CaseRun
from mpctl.measure.bench.scaling import ScalingBench, scaling_cases, scaling_rows
from mpctl.plan.estimate.flops import model_and_hardware_flops
from mpctl.records.rundir.directory import RunDir
from mpctl.render.bench import print_report
from mpctl.spec.load import load_job
from tests.measure.bench.reports import ENVIRONMENT
from tests.measure.bench.small_jobs import planned_case, step_records


def job(**overrides):
    settings = {"parallel.tp": 2, "training.global_batch_size": 16}
    return load_job(None, {**settings, **overrides})


def cases(layouts, *modes):
    return scaling_cases(job(), layouts, modes)


def test_the_smallest_world_is_one_case_for_both_modes():
    found = cases(job_layouts(job().parallel, [1, 2, 4], "job"), "strong", "weak")
    assert [(case.name, case.global_batch_size) for case in found] == [
        ("strong+weak-1-rank", 16),
        ("strong-tp2", 16),
        ("weak-tp2", 32),
        ("strong-tp2-dp2", 16),
        ("weak-tp2-dp2", 64),
    ]
    assert found[0].title == "strong and weak 1 rank"


def test_all_layouts_of_the_smallest_world_have_the_batch_of_the_job():
    found = cases(parse_layouts(["tp=1,2", "pp=1,2"], [2, 4]), "strong", "weak")
    assert [(case.name, case.global_batch_size) for case in found[:2]] == [
        ("strong+weak-dp2", 16),
        ("strong+weak-pp2", 16),
    ]
    assert {case.global_batch_size for case in found if case.modes == ("weak",)} == {32}


@pytest.mark.parametrize("key", ["training.eval_samples", "checkpoint.interval"])
def test_nothing_but_training_is_timed(key):
    (case,) = cases(parse_layouts(["tp=2"]), "strong")
    settings = case.settings(job())
    assert settings[key] == 0 and settings["checkpoint.at_end"] is False
    assert settings["training.global_batch_size"] == 16 and settings["parallel.tp"] == 2


WHERE = ENVIRONMENT


def measured(words, seconds, *, units=2, modes=("strong",), shares=None, **settings):
    """A bench of layouts by words; seconds: of the steps of each round, by a case's name; shares:
    of communication by rank, alike in all runs."""
    base = {"training.global_batch_size": 16, "training.micro_batch_size": 1}
    threads = {"launch.threads_per_rank": 1, "launch.device": "cpu"}
    job = load_job("demo", base)
    cases = scaling_cases(job, parse_layouts(words), modes)
    planned = [planned_case(case.name, **{**base, **threads, **case.settings(job), **settings}) for case in cases]
    reports = [{"rank": n, "communication_share": s} for n, s in enumerate(shares or [])]
    runs = [
        CaseRun(case, number, RunDir(Path("out")), step_records(steps), reports, {}, units)
        for case in planned
        for number, steps in enumerate(seconds.get(case.name, []))
    ]
    return ScalingBench(WHERE, "mpctl bench scaling", 2, planned, "demo", cases, modes, runs=runs)


def rows(*args, **more):
    return measured(*args, **more).report()["results"]


TWO = {"strong-1-rank": [[9, 9, 1.0, 1.2], [9, 9, 0.9]], "strong-tp2": [[9, 9, 0.625]] * 2}


def test_speed_up_and_efficiency_by_hand():
    """1 s on one rank, 0.625 s on two: 1.6 times, 80 %."""
    one, two = rows(["tp=1,2"], TWO)
    assert (one["seconds"], one["seconds_min"], one["seconds_max"], one["rounds"]) == (1.0, 0.9, 1.1, 2)
    assert one["tokens_per_second"] == pytest.approx(16 * 256)
    assert one["efficiency"] == one["predicted_efficiency"] == one["perfect_efficiency"] == 1
    assert two["speed_up"] == pytest.approx(1.6) and two["efficiency"] == pytest.approx(0.8)
    assert (two["name"], two["layout"], two["sizes"]["tp"]) == ("strong tp2", "tp2", 2)
    assert two["cpu_seconds"] == 0.625 / 2
    planned = two["predicted_seconds"]
    assert two["low_seconds"] < planned < two["high_seconds"]
    assert two["predicted_efficiency"] == pytest.approx(one["predicted_seconds"] / planned / 2)


def test_perfect_cores_bound_the_efficiency_of_ranks_that_share_them():
    """4 ranks on 2 cores against 1 rank: twice its speed at best, 50 %; against 2 ranks, 50 %."""
    steps = {f"strong-{name}": [[1.0]] * 2 for name in ("1-rank", "dp2", "dp4")}
    found = rows(["dp=1,2,4"], steps)
    assert [row["perfect_efficiency"] for row in found] == [1, 1, 0.5]
    assert [row["is_rehearsal"] for row in found] == [False, False, True]
    assert [row["perfect_efficiency"] for row in rows(["dp=2,4"], steps)] == [1, 0.5]
    assert [row["perfect_efficiency"] for row in rows(["dp=2,4"], steps, units=1)] == [1, 0.5]


def test_the_fastest_layout_of_the_smallest_world_is_the_baseline():
    bench = measured(["tp=1,2 pp=1,2"], {"strong-tp2": [[0.8]] * 2, "strong-pp2": [[1.0]] * 2})
    report = bench.report()  # of 1 rank and of 4, nothing ran
    assert report["findings"]["baselines"] == {"strong": "strong tp2"}
    assert [(r["layout"], r["efficiency"]) for r in report["results"]] == [("pp2", 0.8), ("tp2", 1)]


def test_weak_scaling_counts_the_tokens_of_a_larger_batch():
    """Twice the batch in the same time on twice the ranks: 100 %."""
    steps = {"weak-1-rank": [[1.0]] * 2, "weak-dp2": [[1.0]] * 2}
    one, two = rows(["dp=1,2"], steps, modes=("weak",))
    assert (one["global_batch_size"], two["global_batch_size"]) == (16, 32)
    assert two["speed_up"] == pytest.approx(2) and two["efficiency"] == pytest.approx(1)


def test_flop_of_a_rank_over_its_seconds_are_rate_and_utilization():
    """Half of the time is twice the rate; of tp2 a rank does half of the FLOP."""
    bench = measured(["tp=1,2"], TWO)
    one, two = bench.report()["results"]
    planned = bench.runs[0].case.plan
    model, hardware = model_and_hardware_flops(planned.layout)
    peak = planned.estimate.time.peak
    assert one["flops_per_second"] == pytest.approx(model / 1.0)
    assert one["mfu"] == pytest.approx(model / peak) and one["hfu"] == pytest.approx(hardware / peak)
    assert two["flops_per_second"] == pytest.approx(one["flops_per_second"] / 2 / 0.625, rel=0.02)


def test_recomputation_counts_only_in_hardware_flop():
    one, _ = rows(["tp=1,2"], TWO, **{"training.recompute": "full"})
    assert 1.2 < one["hfu"] / one["mfu"] < 4 / 3


def test_no_utilization_of_a_device_that_did_not_run():
    other = {"launch.device": "cuda"}
    assert {row["mfu"] for row in rows(["tp=1,2"], TWO, **other)} == {None}
    threads = {"launch.threads_per_rank": 2}
    assert {row["hfu"] for row in rows(["tp=1,2"], TWO, **threads)} == {None}


def test_communication_is_the_mean_of_the_ranks():
    one, two = rows(["tp=1,2"], TWO, shares=[0.1, 0.3])
    assert two["communication_share"] == pytest.approx(0.2)
    assert one["predicted_communication_share"] == 0 < two["predicted_communication_share"] < 1
    assert rows(["tp=1,2"], TWO)[1]["communication_share"] is None


def test_what_ctrl_c_left_is_incomplete_and_of_what_ran():
    bench = measured(["tp=1,2"], {"strong-1-rank": [[1.0]]})
    report = bench.report()
    assert not report["is_complete"] and [row["layout"] for row in report["results"]] == ["1 rank"]
    assert measured(["tp=1,2"], TWO).report()["is_complete"]
    assert scaling_rows([], "weak") == []


def words(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_the_tables_mark_rehearsals_and_what_is_unfinished(capsys):
    steps = {"strong-1-rank": [[1.0]], "strong-dp2": [[0.5]], "strong-dp4": [[0.5]]}
    print_report(measured(["dp=1,2,4"], steps, shares=[0.25]).report(), Path("out"))
    text = words(capsys)
    assert "dp4*" in text and "dp2*" not in text
    assert "4 ranks share 2 cores" in text and "not complete" in text
    assert "15100 / (512 x 39)" in text and "25%" in text


def test_a_load_above_the_cores_is_said(capsys):
    bench = measured(["tp=1,2"], TWO)
    bench.environment = {**WHERE, "load_at_start": 7.84}
    print_report(bench.report(), Path("out"))
    text = words(capsys)
    assert "the load average is 7.8 on 2 cores" in text and "rehearsal" not in text
