"""Experts' rows of one micro batch sent beside another's kernels, and buffers of a fixed capacity."""

from typing import Any

import pytest

from mpctl import load_plan
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.expert_overlap import least, overlap, paired_share
from mpctl.plan.estimate.kernels import OpTimes
from mpctl.plan.planning.plan import Plan
from mpctl.plan.rules.launched import settings_not_launched
from mpctl.spec.load import load_job

QWEN: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "model.seq_length": 4096,
    "cluster": "dgx-h100",
    "cluster.nodes": 2,
    "parallel.ep": 16,
    "parallel.zero": 1,
    "training.global_batch_size": 1024,
    "training.runtime": "megatron-core",
    "training.moe_load": 1.0,
}


def _plan(**settings: Any) -> Plan:
    plan = load_plan(None, {**QWEN, **settings})
    assert not plan.errors
    return plan


def _seconds(plan: Plan) -> float:
    assert plan.estimate is not None and not isinstance(plan.estimate.time, str)
    return plan.estimate.time.total


@pytest.mark.parametrize(
    ("dispatcher", "without", "measured"), [("hybridep", 24.71, 20.99), ("alltoall", 41.25, 31.31)]
)
def test_a_step_gets_faster_as_megatron_bridge_measured(dispatcher: str, without: float, measured: float) -> None:
    """Qwen3-30B on 16 H100, routing forced to be even: its guide to overlapped messages."""
    found = {"training.moe_dispatcher": dispatcher}
    plain, overlapped = _plan(**found), _plan(**found, **{"training.moe_overlap": True})
    assert _seconds(overlapped) / _seconds(plain) == pytest.approx(measured / without, rel=0.03)


def test_one_more_layer_is_held_without_a_pipeline_and_one_more_chunk_with_one() -> None:
    staged = {"parallel.pp": 2, "parallel.ep": 8, "parallel.vpp": 4}
    for settings, kept in (({}, 1 / 48), (staged, 1 / 9)):  # warm-up of stage 0: 2 + 3 x 2 chunks, and one
        memory = [_plan(**settings, **{"training.moe_overlap": on}).estimate for on in (False, True)]
        plain, overlapped = (found.memory[0].activation_bytes for found in memory if found is not None)
        assert overlapped / plain - 1 == pytest.approx(kept, rel=0.05)


def test_forwards_before_the_first_backward_run_alone() -> None:
    layouts = [JobLayout.of(load_job(None, {**QWEN, **own})) for own in ({}, {"parallel.pp": 2, "parallel.vpp": 4})]
    assert paired_share(layouts[0], 0) == 1 - 1 / 64
    assert [paired_share(layouts[1], stage) for stage in (0, 1)] == [1 - 9 / 512, 1 - 7 / 512]


def test_no_more_is_hidden_than_the_other_direction_takes() -> None:
    work = OpTimes(forward=1.0, dgrad=2.0, wgrad=1.0, ep_forward=10.0, ep_backward=3.0)
    bound = least(work, 0.5, 0.0)
    overlap(work, 0.5, 0.0, 0.1)
    assert (work.ep_forward, work.ep_backward) == pytest.approx((7.0, 2.0))  # 3 of 5 s, and 1 of 1.5
    assert (work.forward, work.dgrad) == pytest.approx((1.1, 2.3))
    assert (bound.ep_forward, bound.ep_backward) == (5.0, 1.5)


def test_buffers_hold_their_capacity_and_a_stash_keeps_less_of_it() -> None:
    """By hand: of a layer's rows 2 h and 6 f bytes each are kept, k T x load rows."""
    routed = 8 * 4096 * (2 * 2048 + 6 * 768)  # bytes of a layer at load 1, of 48
    fixed = {"training.moe_dispatcher": "hybridep"}
    at = [
        _bytes(**fixed, **own)
        for own in (
            {"training.moe_load": 1.0},
            {"training.moe_load": 1.0, "training.moe_capacity": 2.0},
            {"training.moe_load": 1.0, "training.moe_capacity": 2.0, "training.moe_stash": 1.0},
        )
    ]
    assert (at[1] - at[0]) / (48 * routed) == pytest.approx(1, rel=0.02)
    assert at[2] - at[0] == pytest.approx(routed, rel=0.02)
    even = {**fixed, "training.moe_load": 1.0}
    assert _seconds(_plan(**even)) == _seconds(_plan(**even, **{"training.moe_capacity": 2.0}))


def test_pages_on_the_host_are_in_its_memory() -> None:
    """By hand: 48 layers of the same rows at one and a half of the mean; the overlap has one layer more in flight."""
    fixed = {"training.moe_dispatcher": "hybridep", "training.moe_capacity": 2.0, "training.moe_stash": 1.0}
    routed = 1.5 * 8 * 4096 * (2 * 2048 + 6 * 768)
    estimates = [
        _plan(**fixed, **own).estimate
        for own in (
            {},
            {"training.moe_stash_host": 1.5},
            {"training.moe_stash_host": 1.5, "training.moe_overlap": True},
        )
    ]
    assert [found.host_memory.offloaded_bytes for found in estimates] == [0, 48 * routed, 49 * routed]
    assert len({found.memory[0].device_bytes for found in estimates[:2]}) == 1


def _bytes(**settings: Any) -> float:
    estimate = _plan(**settings).estimate
    assert estimate is not None
    return estimate.memory[0].activation_bytes + estimate.memory[0].working_bytes


def test_it_is_planned_not_launched() -> None:
    job = load_job(None, {"model": "demo-moe", "training.moe_overlap": True, "training.moe_capacity": 2.0})
    where = [check.where for check in settings_not_launched(job)]
    assert {"training.moe_overlap", "training.moe_capacity"} <= {*where}
