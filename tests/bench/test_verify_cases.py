"""Which plans can be verified, and under which names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mpctl.bench.cases import plan_cases
from mpctl.bench.layouts import (
    DEFAULT_SETTINGS,
    parse_layouts,
)
from mpctl.bench.verify_cases import Wanted, verify_cases, wanted_layouts
from mpctl.errors import InputError
from mpctl.hosts.machine import Machine
from mpctl.planning.plan import Plan, load_plan

MACHINE = Machine(cores=2, gpus=0, memory_bytes=2**40)
ONE = {"parallel.tp": 1, "cluster.gpus_per_node": 1}


def demo(settings: Mapping[str, object]) -> Plan:
    return load_plan("demo", {**DEFAULT_SETTINGS, **settings})


def wanted(job: str = "", **settings: Any) -> Wanted:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return Wanted(job, lambda: load_plan("demo", {**ONE, **named}))


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
    settings = [layout.settings(base) for layout in parse_layouts(["tp=1,2", "pp=1,2"])]
    cases = verify_cases(wanted_layouts(demo, settings))
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
    asked = Wanted("", lambda: load_plan(None, {"model": "demo-gpt", "launch.device": "cpu"}))
    assert "no-step-time" in refused(asked, tmp_path=tmp_path)
