"""The planned measurements of a machine, and jobs that are refused before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.bench.machine_plan import MachineWork, default_name, plan_machine
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.run.clusters.registry import find_backend
from mpctl.run.hosts.machine import Machine

TWO_CORES = Machine(2, 0, 8 * 2**30)


BATCH = {"training.micro_batch_size": 2, "training.global_batch_size": 8}


def work(
    machine: Machine = TWO_CORES,
    *,
    cluster: str = "this-machine",
    shape: Mapping[str, object] | None = None,
    **more: Any,
) -> MachineWork:
    def plan_with(settings: Mapping[str, object]) -> Plan:
        return load_plan("demo", {"cluster": cluster, **BATCH, **(shape or {}), **settings})

    return plan_machine(plan_with, machine, **{"name": "mine", **more})


def rules_of(**more: Any) -> set[str]:
    with pytest.raises(InputError) as caught:
        work(**more)
    return {issue.rule for issue in caught.value.issues}


def test_two_cores_by_hand() -> None:
    found = work()
    assert found.kernels.ranks == (1, 2)
    kernels = {(kernel.case["dtype"], kernel.case["kernel"]) for kernel in found.kernels.kernels}
    assert {name for dtype, name in kernels if dtype == "bf16"} == {"matmul"}  # its peak alone
    assert {"matmul", "branch", "optimizer", "triad"} < {n for dtype, n in kernels if dtype == "fp32"}
    collectives = found.collectives(None)
    assert collectives is not None
    assert {(case["axis"], case["transport"]) for case in collectives.cases} == {("tp", "gloo"), ("tp", "shared")}
    assert not collectives.is_rehearsal
    cases = [case.name for case in found.cases()]
    assert len(cases) == 11 and {"1-rank", "tp2", "dp2-zero3", "pp2-vpp2"} <= set(cases)
    assert found.memory_bytes == int(0.9 * 4 * 2**30)
    assert found.rounds == 3


def test_many_cores_have_groups_of_two_and_of_half_of_them() -> None:
    found = work(Machine(8, 0, 32 * 2**30))
    collectives = found.collectives(10.0)
    assert collectives is not None
    assert {axis: collectives.sizes[axis] for axis in ("tp", "dp_cp")} == {"tp": 2, "dp_cp": 4}
    assert collectives.options.seconds == 10.0
    assert found.kernels.ranks == (1, 8)


def test_it_is_this_machine_that_is_measured_inside_of_an_allocation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one node: mpctl launch would start its ranks on the node, by srun."""
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert find_backend(load_plan("demo", BATCH).job, os.environ).name == "slurm"
    found = work()
    collectives = found.collectives(None)
    assert collectives is not None
    plans = [found.kernels.plan, collectives.plan, *(case.make_plan() for case in found.cases())]
    assert {find_backend(plan.job, os.environ).name for plan in plans} == {"local"}


def test_quick_measures_less() -> None:
    quick, whole = work(quick=True), work()
    assert quick.rounds == 1 and len(quick.cases()) < len(whole.cases())
    assert len(quick.kernels.kernels) < len(whole.kernels.kernels)
    few, all_of_them = quick.collectives(None), whole.collectives(None)
    assert few is not None and all_of_them is not None
    assert len(few.cases) < len(all_of_them.cases)
    assert work(quick=True, rounds=5).rounds == 5


def test_one_core_sends_nothing() -> None:
    found = work(Machine(1, 0, 8 * 2**30))
    assert found.collectives(None) is None
    assert [case.name for case in found.cases()] == ["1-rank", "1-rank-recompute"]


def test_every_rank_has_a_device_of_its_own() -> None:
    for cores in (2, 4):
        plans = [case.make_plan() for case in work(Machine(cores, 0, 2**34)).cases()]
        assert {plan.job.world_size for plan in plans} == {n for n in (1, 2, 4) if n <= cores}


def test_layouts_that_a_model_cannot_have_are_left_out() -> None:
    odd = {"model.heads": 1, "model.kv_heads": 1, "model.head_dim": 256}
    found = [case.name for case in work(shape=odd).cases()]
    assert "tp2" not in found and {"1-rank", "dp2", "pp2"} <= set(found)


def test_runs_are_planned_on_the_cluster_that_was_measured() -> None:
    found = work()
    slow = {**found.plan_with({}).job.cluster.model_dump(exclude_none=True), "slowdown": 2.0}
    plans = [found.cases(cluster)[0].make_plan() for cluster in (None, slow)]
    seconds = [plan.estimate.step_seconds for plan in plans if plan.estimate is not None]
    assert plans[1].job.cluster.slowdown == 2.0
    assert seconds[0] is not None and seconds[1] is not None and seconds[1] > 1.3 * seconds[0]


def test_all_issues_are_reported_together() -> None:
    assert rules_of(name="a b", given=["tp"], cluster="dgx-h100") == {"bad-name", "layout-setting", "machine-device"}


def test_a_host_gives_the_default_name() -> None:
    assert [default_name(host) for host in ("Box.lan", "a_b", "--", "a b")] == ["Box", "a_b", "my-machine", "a-b"]
