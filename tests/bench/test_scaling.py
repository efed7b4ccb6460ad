"""Cases of a scaling bench by hand."""

import pytest

from mpctl.bench.layouts import job_layouts, parse_layouts
from mpctl.bench.scaling import efficiency, scaling_cases
from mpctl.spec.load import load_job


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
        ("strong+weak-dp2", 16), ("strong+weak-pp2", 16),
    ]  # fmt: skip
    assert {case.global_batch_size for case in found if case.modes == ("weak",)} == {32}


@pytest.mark.parametrize("key", ["training.eval_samples", "checkpoint.interval"])
def test_nothing_but_training_is_timed(key):
    (case,) = cases(parse_layouts(["tp=2"]), "strong")
    settings = case.settings(job())
    assert settings[key] == 0 and settings["checkpoint.at_end"] is False
    assert settings["training.global_batch_size"] == 16 and settings["parallel.tp"] == 2


def test_the_published_efficiency_of_512_gpus():
    """15.1 PFLOP/s on 512 GPUs against 39 TFLOP/s on one, as arXiv 1909.08053 states: 76 %."""
    assert f"{efficiency(15.1e15, 512, 39e12, 1):.0%}" == "76%"
    assert efficiency(3.0, 4, 2.0, 2) == 0.75
