"""Which plans can be verified, under which names, and which layouts of the built-in set."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.bench.cases import plan_cases
from mpctl.measure.bench.layouts import DEFAULT_LAYOUTS, DEFAULT_SETTINGS, QUICK_LAYOUTS, parse_layouts, ranks_of
from mpctl.measure.bench.verify_cases import PlanWith, Wanted, built_in_set, verify_cases, wanted_plan
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.run.hosts.machine import Machine
from mpctl.spec.names import full_name

MACHINE = Machine(cores=2, gpus=0, memory_bytes=2**40)
ONE = {"parallel.tp": 1, "cluster.gpus_per_node": 1}


def demo(settings: Mapping[str, object]) -> Plan:
    return load_plan("demo", {**DEFAULT_SETTINGS, **settings})


def wanted(job: str = "", **settings: Any) -> Wanted:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return wanted_plan(lambda: load_plan("demo", {**ONE, **named}), job)


def test_cases_are_named_by_job_and_layout(tmp_path: Any) -> None:
    two = {"parallel__tp": 2, "cluster__gpus_per_node": 2}
    asked = [wanted("a", **two), wanted("a", **two, training__seed=2), wanted("b")]
    cases = verify_cases(asked)
    assert [case.title for case in cases] == ["a tp2", "a tp2 (2)", "b 1 rank"]
    assert [case.name for case in cases] == ["a-tp2", "a-tp2-2", "b-1-rank"]
    planned = plan_cases(cases, tmp_path / "out", MACHINE, overwrite=False)
    assert [case.job.world_size for case in planned] == [2, 2, 1]


def test_layouts_of_one_job_are_named_by_what_they_split() -> None:
    base = demo(ONE).job
    layouts = parse_layouts(["tp=1,2", "pp=1,2"])
    cases = verify_cases([wanted_plan(partial(demo, each.settings(base))) for each in layouts])
    assert [case.title for case in cases] == ["1 rank", "pp2", "tp2", "tp2 pp2"]
    assert [case.make_plan().job.world_size for case in cases] == [1, 2, 2, 4]


def refused(*asked: Wanted, tmp_path: Any) -> set[str]:
    with pytest.raises(InputError) as error:
        plan_cases(verify_cases(asked), tmp_path / "out", MACHINE, overwrite=False)
    return {issue.rule for issue in error.value.issues}


def test_all_that_cannot_be_verified_is_refused_at_once(tmp_path: Any) -> None:
    other_device = wanted(cluster="dgx-h100", cluster__nodes=1, launch__device="cpu")
    illegal = wanted(parallel__tp=3, cluster__gpus_per_node=3)
    rules = refused(other_device, illegal, tmp_path=tmp_path)
    assert {"verify-device", "tp-divides-heads"} <= rules


def test_a_plan_without_a_step_time_is_refused(tmp_path: Any) -> None:
    asked = wanted_plan(lambda: load_plan(None, {"model": "demo-gpt", "launch.device": "cpu"}))
    assert "no-step-time" in refused(asked, tmp_path=tmp_path)


TWO_CORES = Machine(cores=2, gpus=0, memory_bytes=2**40)


def demo_on(**settings: object) -> PlanWith:
    """Plans the demo_on with these settings, __ for a dot, and with more over them."""
    own = {key.replace("__", "."): value for key, value in settings.items()}

    def plan_with(more: Mapping[str, object]) -> Plan:
        return load_plan("demo", {**DEFAULT_SETTINGS, **own, **more})

    return plan_with


def test_the_set_is_complete_on_cpu_and_quick_takes_a_few() -> None:
    whole, left_out = built_in_set(demo_on(), {"training.steps": 3}, TWO_CORES, quick=False)
    assert len(whole) == len(DEFAULT_LAYOUTS) and not left_out
    assert [case.make_plan().job.world_size for case in verify_cases(whole[:3])] == [1, 1, 2]
    quick, _ = built_in_set(demo_on(), {}, TWO_CORES, quick=True)
    assert len(quick) == len(QUICK_LAYOUTS)


def test_layouts_of_more_ranks_than_gpus_are_left_out() -> None:
    one_gpu = Machine(cores=16, gpus=1, memory_bytes=2**40)
    able, left_out = built_in_set(demo_on(launch__device="cuda"), {}, one_gpu, quick=False)
    assert len(able) == sum(ranks_of(layout) == 1 for layout in DEFAULT_LAYOUTS) == 2
    assert len(left_out) == len(DEFAULT_LAYOUTS) - 2
    assert left_out["tp2 dp2 zero1 recompute"] == "this machine shows 1 GPU"


def test_what_a_model_cannot_have_is_left_out_with_the_reason() -> None:
    able, left_out = built_in_set(demo_on(model="demo-bert"), {}, TWO_CORES, quick=False)
    assert len(able) == len(DEFAULT_LAYOUTS) - 1
    assert left_out == {"tp4 2d": "family bert does not run in 2d"}
    three = built_in_set(demo_on(model__layers=3), {}, TWO_CORES, quick=True)[1]
    assert list(three) == ["pp2"] and "3" in three["pp2"]


def test_where_no_layout_is_left_the_reasons_are_reported_as_of_any_job(tmp_path: Path) -> None:
    able, left_out = built_in_set(demo_on(training__steps=-1), {}, TWO_CORES, quick=True)
    assert len(able) == len(QUICK_LAYOUTS) and not left_out
    with pytest.raises(InputError, match=r"training\.steps"):
        plan_cases(verify_cases(able), tmp_path / "out", TWO_CORES, overwrite=False)


def test_settings_that_layouts_have_of_their_own_are_refused() -> None:
    for name in ("parallel.tp", "zero", "cluster.gpus_per_node", "recompute"):
        with pytest.raises(InputError) as error:
            built_in_set(demo_on(), {"training.steps": 3, name: 1}, TWO_CORES, quick=False)
        (issue,) = error.value.issues
        assert issue.where == full_name(name) and "name the JOB" in issue.hint


def test_layouts_that_do_not_fill_the_nodes_are_left_out() -> None:
    plan_with = demo_on(cluster__inter_node__bandwidth=1e9)
    able, left_out = built_in_set(plan_with, {"nodes": 2}, TWO_CORES, quick=True)
    assert left_out == {"1 rank": "1 rank cannot be shared evenly by 2 nodes"}
    clusters = [case.make_plan().job.cluster for case in verify_cases(able)]
    assert {(cluster.nodes, cluster.gpus_per_node) for cluster in clusters} == {(2, 1), (2, 2)}
    assert len(able) == len(QUICK_LAYOUTS) - 1
