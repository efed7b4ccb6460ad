"""States in host memory: bytes on both sides, and seconds over the link, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.host_memory import host_memory
from mpctl.plan.estimate.memory import layout_memory
from mpctl.plan.estimate.offload import (
    HOST_UPDATE,
    REACHED,
    gradients_down,
    link_seconds,
    overlapped_update,
    update_and_return,
)
from mpctl.plan.estimate.states import find_states
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.estimate.time import find_step_time, step_time_model
from mpctl.plan.planning.plan import make_plan
from tests.jobs import job_of

BASE = {"launch.device": "cuda", "training.dtype": "bf16", "training.runtime": "megatron-deepspeed"}
BASE |= {"cluster.device": "a100-80gb", "checkpoint.asynchronous": False}
OPTIMIZER, BOTH = {"training.offload_optimizer": True}, {"training.offload_parameters": True, "parallel.zero": 3}
BOTH |= OPTIMIZER


def layout(**settings: Any) -> JobLayout:
    return JobLayout.of(job_of({**BASE, **settings}))


def on_device(**settings: Any) -> tuple[int, int, int, int]:
    states = find_states(layout(**settings), 0)
    return states.parameters, states.gradients, states.optimizer, states.host


def test_what_is_offloaded_is_on_the_host_and_not_on_the_device() -> None:
    count = find_states(layout(), 0).count
    assert on_device() == (2 * count, 6 * count, 12 * count, 0)
    assert on_device(**OPTIMIZER) == (2 * count, 6 * count, 0, 12 * count)
    assert on_device(**OPTIMIZER, **{"parallel.zero": 2}) == (2 * count, 0, 0, 18 * count)
    assert on_device(**BOTH) == (0, 0, 0, 20 * count)
    paged = find_states(layout(**{"training.optimizer": "paged-adamw-8bit"}), 0)
    plain = find_states(layout(**{"training.optimizer": "adamw-8bit"}), 0)
    assert (paged.optimizer, paged.host, paged.paged) == (0, plain.optimizer, plain.optimizer)


def test_a_cpu_is_its_own_host() -> None:
    cpu = {"launch.device": "cpu", "cluster.device": "cpu", **OPTIMIZER}
    assert on_device(**cpu)[3] == 0


def test_hosts_hold_the_states_of_their_ranks_and_are_checked() -> None:
    two = {**OPTIMIZER, "parallel.dp": 2, "cluster.gpus_per_node": 2}
    count = find_states(layout(), 0).count
    found = host_memory(layout(**two))
    assert (found.state_bytes, found.node_bytes) == (12 * count, 24 * count)
    (check,) = [
        check
        for check in make_plan(job_of({**BASE, **two, "cluster.host_memory": 24 * count})).checks
        if check.rule == "host-memory-fits"
    ]
    assert check.status == "warning" and "states, offloaded inputs" in check.message and "adafactor" in check.hint


def test_the_peak_falls_by_what_is_offloaded() -> None:
    (usual,), (offloaded,) = (layout_memory(layout(**one)) for one in ({}, OPTIMIZER))
    assert usual.allocated_bytes - offloaded.allocated_bytes == 12 * usual.parameters


def step(**settings: Any) -> StepTime:
    found = find_step_time(layout(**settings))
    assert isinstance(found, StepTime)
    return found


def test_an_update_on_the_host_takes_its_memory_and_the_link() -> None:
    """30 bytes a parameter at 117 GB/s, and 2 back over PCIe 4; ranks of a node share the memory."""
    one = layout(**OPTIMIZER)
    assert pytest.approx(10e9 * 30 / 2.57) == HOST_UPDATE
    assert link_seconds(one, 32e9) == pytest.approx(1 / REACHED)
    expected = 30e9 / HOST_UPDATE + 2e9 / (REACHED * 32e9)
    assert update_and_return(one, 1e9) == pytest.approx(expected)
    eight = layout(**OPTIMIZER, **{"parallel.dp": 8, "cluster.gpus_per_node": 8})
    assert update_and_return(eight, 1e9) == pytest.approx(8 * 30e9 / HOST_UPDATE + 2e9 / (REACHED * 32e9))
    fast = layout(**OPTIMIZER, **{"cluster.host_bandwidth": 4e11, "cluster.device": "h100-sxm"})
    assert update_and_return(fast, 1e9) == pytest.approx(30e9 / 4e11 + 2e9 / (REACHED * 64e9))
    count = find_states(one, 0).count
    assert step(**OPTIMIZER).optimizer >= update_and_return(one, count)
    assert step(**OPTIMIZER).compute == step().compute


def test_parameters_come_once_in_each_pass() -> None:
    """Nothing overlaps under this profile: twice 2 bytes a parameter and micro batch."""
    zero = {"parallel.zero": 3}
    count = find_states(layout(), 0).count
    added = step(**BOTH, **{"training.global_batch_size": 4}).dp_cp - step(**zero).dp_cp
    overlap = layout().profile.overlap
    hidden = overlap.zero * (1 - overlap.drag)
    assert added == pytest.approx(4 * 2 * link_seconds(layout(), 2 * count) * (1 - hidden), rel=1e-6)


def test_paged_states_cross_the_link_only_where_they_do_not_fit() -> None:
    paged = {"training.optimizer": "paged-adamw-8bit", "training.runtime": "fsdp2"}
    roomy, plain = step(**paged), step(**{**paged, "training.optimizer": "adamw-8bit"})
    assert roomy.optimizer == plain.optimizer
    need = layout_memory(layout(**paged))[0].device_bytes
    full = {"cluster.device": {**_device(), "memory_bytes": round(need / 0.95)}}
    moved = find_states(layout(**paged), 0).paged
    tight = step(**paged, **full)
    assert tight.optimizer - plain.optimizer == pytest.approx(link_seconds(layout(), 2 * moved), rel=1e-3)


def _device() -> dict[str, Any]:
    device = layout().job.cluster.device
    assert device is not None
    return device.model_dump(mode="json", exclude_none=True)


def test_a_share_of_the_states_is_offloaded_and_the_rest_updated_on_the_device() -> None:
    count = find_states(layout(), 0).count
    half = {**OPTIMIZER, "training.offload_fraction": 0.5}
    assert on_device(**half) == (2 * count, 6 * count, 6 * count, 6 * count)
    none, part, whole = (step(**one).optimizer for one in ({}, half, OPTIMIZER))
    assert part == pytest.approx((none + whole) / 2, rel=1e-3)


def test_copies_overlap_with_the_hosts_update() -> None:
    """A tensor's gradient goes down and its parameters up while the host updates others: the longer of both."""
    one = layout(**OPTIMIZER)
    update = 30e9 / HOST_UPDATE
    assert overlapped_update(one, 0.01, 1e9) == pytest.approx(update)
    assert overlapped_update(one, 1.0, 1e9) == pytest.approx(1.0 + link_seconds(one, 2e9))
    both = {**OPTIMIZER, "training.offload_overlap": True}
    assert step(**both).optimizer <= step(**OPTIMIZER).optimizer


MEASURED = (  # seconds that offloading adds to a step: elements a rank, GPUs of a node, share, overlap
    (0.596e9, 1, 0.5, False, 0.435),  # Qwen3-0.6B on an H100: NeMo-RL, pull request 3628
    (0.596e9, 1, 0.5, True, 0.464),
    (0.596e9, 1, 1.0, True, 0.926),
    (30.5e9 / 16, 8, 0.25, False, 0.875),  # Qwen3-30B-A3B on 16 H100: Megatron-Bridge's card of cpu-offloading
    (30.5e9 / 16, 8, 0.5, False, 1.488),
    (30.5e9 / 16, 8, 0.75, False, 2.191),
    (30.5e9 / 16, 8, 1.0, False, 3.193),
    (30.5e9 / 16, 8, 1.0, True, 2.881),
)


@pytest.mark.parametrize(("elements", "ranks", "share", "overlaps", "measured"), MEASURED)
def test_megatrons_update_on_the_host_takes_as_long_as_measured(
    elements: float, ranks: int, share: float, overlaps: bool, measured: float
) -> None:
    """What the device no longer updates is taken off."""
    node = {"cluster.device": "h100-sxm", "cluster.gpus_per_node": ranks, "parallel.dp": ranks}
    one = layout(**OPTIMIZER, **node, **{"training.runtime": "megatron-core"})
    down = gradients_down(one, one.profile, share * elements)
    added = overlapped_update(one, down, share * elements)
    if not overlaps:
        added = down + update_and_return(one, share * elements)
    saved = share * step_time_model(one).operators.optimizer_seconds(round(elements))
    assert added - saved == pytest.approx(measured, rel=0.15)


def test_nothing_of_megatrons_offloading_overlaps_with_backward() -> None:
    megatron = {"training.runtime": "megatron-core", "cluster.device": "h100-sxm"}
    one = layout(**OPTIMIZER, **megatron)
    count = find_states(one, 0).count
    both = gradients_down(one, one.profile, count) + update_and_return(one, count)
    assert step(**OPTIMIZER, **megatron).optimizer == pytest.approx(both)
    slow = layout(**OPTIMIZER, **megatron, **{"cluster.host_bandwidth": 1e9})
    assert update_and_return(slow, count) > 30 * count / 1e9
