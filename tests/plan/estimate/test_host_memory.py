"""Host memory of offloaded inputs and of copies for checkpoints, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.host_memory import host_memory, offloaded_bytes
from mpctl.plan.planning.plan import make_plan
from mpctl.spec.load import load_job

OFFLOADED: dict[str, Any] = {
    "model.layers": 8,
    "model.hidden": 64,
    "model.heads": 4,
    "model.vocab": 512,
    "model.seq_length": 128,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 16,
    "training.dtype": "bf16",
    "training.recompute": "full",
    "training.offload_activations": True,
    "launch.device": "cuda",
    "cluster.gpus_per_node": 1,
}
INPUT = 2 * 128 * 64 * 2  # bytes of a layer's input


def layout(**changes: Any) -> JobLayout:
    return JobLayout.of(load_job(None, OFFLOADED | {k.replace("__", "."): v for k, v in changes.items()}))


@pytest.mark.parametrize(
    ("changes", "inputs"),
    [
        ({}, [8]),
        ({"parallel__tp": 2, "training__partition_activations": True}, [4]),
        ({"parallel__pp": 2}, [2 * 4, 4]),
        ({"parallel__pp": 2, "parallel__schedule": "gpipe"}, [8 * 4, 8 * 4]),
        ({"parallel__pp": 2, "parallel__vpp": 2}, [5 * 2, 3 * 2]),
        ({"launch__device": "cpu", "training__dtype": "fp32"}, [0]),
        ({"training__offload_activations": False}, [0]),
    ],
)
def test_inputs_of_the_micro_batches_in_flight_wait_on_the_host(changes: dict[str, Any], inputs: list[int]) -> None:
    ranks = changes.get("parallel__tp", 1) * changes.get("parallel__pp", 1)
    found = offloaded_bytes(layout(**changes, cluster__gpus_per_node=ranks))
    assert found == [number * INPUT for number in inputs]


def test_a_node_has_the_inputs_of_its_ranks_and_the_copies_of_those_that_write() -> None:
    own = layout(parallel__dp=4, training__global_batch_size=16, cluster__gpus_per_node=2, cluster__nodes=2)
    found = host_memory(own)
    assert (found.offloaded_bytes, found.node_bytes) == (8 * INPUT, 2 * 8 * INPUT + found.snapshot_bytes)
    waits = layout(checkpoint__asynchronous=False)
    assert host_memory(waits).snapshot_bytes == 0
    assert host_memory(waits).node_bytes == 8 * INPUT


def test_a_plan_warns_where_the_hosts_of_the_cluster_are_too_small() -> None:
    def status(memory: int | None) -> list[str]:
        plan = make_plan(load_job(None, OFFLOADED | {"cluster.host_memory": memory}))
        return [check.status for check in plan.checks if check.rule == "host-memory-fits"]

    need = host_memory(layout()).node_bytes
    assert (status(None), status(need * 9 // 8), status(need)) == ([], ["ok"], ["warning"])
