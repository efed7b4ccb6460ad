"""Which of the built-in layouts a job's model, nodes and machine can have, and what is said of the
others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mpctl.bench.cases import plan_cases
from mpctl.bench.layouts import DEFAULT_LAYOUTS, DEFAULT_SETTINGS, QUICK_LAYOUTS, ranks_of
from mpctl.bench.verify_cases import PlanWith, built_in_set, verify_cases
from mpctl.errors import InputError
from mpctl.hosts.machine import Machine
from mpctl.planning.plan import Plan, load_plan
from mpctl.spec.names import full_name

MACHINE = Machine(cores=2, gpus=0, memory_bytes=2**40)


def demo(**settings: object) -> PlanWith:
    """Plans the demo with these settings, __ for a dot, and with more over them."""
    own = {key.replace("__", "."): value for key, value in settings.items()}

    def plan_with(more: Mapping[str, object]) -> Plan:
        return load_plan("demo", {**DEFAULT_SETTINGS, **own, **more})

    return plan_with


def test_the_set_is_whole_on_cpu_and_quick_takes_a_few() -> None:
    whole, left_out = built_in_set(demo(), {"training.steps": 3}, MACHINE, quick=False)
    assert len(whole) == len(DEFAULT_LAYOUTS) and not left_out
    assert [wanted.make_plan().job.world_size for wanted in whole[:3]] == [1, 1, 2]
    quick, _ = built_in_set(demo(), {}, MACHINE, quick=True)
    assert len(quick) == len(QUICK_LAYOUTS)


def test_layouts_of_more_ranks_than_gpus_are_left_out() -> None:
    one_gpu = Machine(cores=16, gpus=1, memory_bytes=2**40)
    able, left_out = built_in_set(demo(launch__device="cuda"), {}, one_gpu, quick=False)
    assert len(able) == sum(ranks_of(layout) == 1 for layout in DEFAULT_LAYOUTS) == 2
    assert len(left_out) == len(DEFAULT_LAYOUTS) - 2
    assert left_out["tp2 dp2 zero1 recompute"] == "this machine shows 1 GPU"


def test_what_a_model_cannot_have_is_left_out_with_the_reason() -> None:
    able, left_out = built_in_set(demo(model="demo-bert"), {}, MACHINE, quick=False)
    assert len(able) == len(DEFAULT_LAYOUTS) - 1
    assert left_out == {"tp4 2d": "family bert does not run in 2d"}
    three = built_in_set(demo(model__layers=3), {}, MACHINE, quick=True)[1]
    assert list(three) == ["pp2"] and "3" in three["pp2"]


def test_where_no_layout_is_left_the_reasons_are_reported_as_of_any_job(tmp_path: Path) -> None:
    able, left_out = built_in_set(demo(training__steps=-1), {}, MACHINE, quick=True)
    assert len(able) == len(QUICK_LAYOUTS) and not left_out
    with pytest.raises(InputError, match=r"training\.steps"):
        plan_cases(verify_cases(able), tmp_path / "out", MACHINE, overwrite=False)


@pytest.mark.parametrize("name", ["parallel.tp", "zero", "cluster.gpus_per_node", "recompute"])
def test_settings_that_layouts_have_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(InputError) as error:
        built_in_set(demo(), {"training.steps": 3, name: 1}, MACHINE, quick=False)
    (issue,) = error.value.issues
    assert issue.where == full_name(name) and "name the JOB" in issue.hint


def test_layouts_that_do_not_fill_the_nodes_are_left_out() -> None:
    able, left_out = built_in_set(demo(), {"nodes": 2}, MACHINE, quick=True)
    assert left_out == {"1 rank": "1 rank cannot be shared evenly by 2 nodes"}
    clusters = [wanted.make_plan().job.cluster for wanted in able]
    assert {(cluster.nodes, cluster.gpus_per_node) for cluster in clusters} == {(2, 1), (2, 2)}
    assert len(able) == len(QUICK_LAYOUTS) - 1
