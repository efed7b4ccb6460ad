"""What mpctl's own trainer took on an H200 beside its plan: step time, tensors and the allocator's memory."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mpctl.plan.planning.plan import Plan, load_plan

RECORDED = json.loads((Path(__file__).parents[1] / "recorded/gpu_h200.json").read_text("utf-8"))
RUNS: list[dict[str, Any]] = RECORDED["runs"]


def plan_of(run: dict[str, Any]) -> Plan:
    one = {"cluster.nodes": 1, "cluster.gpus_per_node": 1, "cluster.device": RECORDED["device"]}
    return load_plan(None, {**one, **run["job"]})


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["case"])
def test_tensors_are_as_planned_and_the_allocator_takes_less_than_its_slack(run: dict[str, Any]) -> None:
    estimate = plan_of(run).estimate
    assert estimate is not None
    (stage,) = estimate.memory
    assert abs(run["bytes"] / stage.allocated_bytes - 1) < 5e-4
    assert 0.97 < run["reserved"] / stage.reserved_bytes <= 1.0


def test_steps_take_what_is_planned() -> None:
    """Within 5 % in the mean and 12 % at most; all inside of the band that the plan states."""
    errors = []
    for run in RUNS:
        estimate = plan_of(run).estimate
        assert estimate is not None
        time = estimate.time
        errors.append(abs(time.total / run["seconds"] - 1))
        assert time.low < run["seconds"] < time.high, run["case"]
    assert fmean(errors) < 0.05 and max(errors) < 0.12


def test_one_such_device_is_measured_and_a_node_of_them_is_not() -> None:
    one = {"model": "gpt2", "cluster": "dgx-h200", "cluster.nodes": 1}
    for gpus, is_known in ((1, True), (8, False)):
        estimate = load_plan(None, {**one, "cluster.gpus_per_node": gpus}).estimate
        assert estimate is not None and (not estimate.time.extrapolates) == is_known
