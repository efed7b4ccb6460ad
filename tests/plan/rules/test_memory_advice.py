"""The advice of a job that does not fit: settings that can still be raised, and no others."""

from __future__ import annotations

import pytest

from mpctl.plan.rules.model import memory_advice
from mpctl.spec.load import load_job

JOB = {
    "cluster": "dgx-h100",
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 8,
    "model": "llama-3-70b",
    "training.runtime": "megatron-core",
    "training.global_batch_size": 16,
}
FULL = {"training.recompute": "full"}
MORE = "use more GPUs, a smaller model or shorter sequences"


@pytest.mark.parametrize(
    ("own", "advice"),
    [
        ({}, "raise tp, pp or zero, or training.recompute full"),
        ({"parallel.tp": 8}, "raise pp or zero, or training.recompute full"),  # tp fills the node
        ({"parallel.tp": 8, "parallel.zero": 3, **FULL}, "raise pp"),
        ({"parallel.tp": 8, "parallel.pp": 2, **FULL}, MORE),  # no replica is left
        ({"training.runtime": "fsdp2", "parallel.zero": 3, **FULL}, "raise tp or pp"),
        ({"parallel.tp": 8, "parallel.pp": 2}, "training.recompute full, or more GPUs"),
        ({"model": "qwen3-30b-a3b", "parallel.tp": 8, "parallel.zero": 3, **FULL}, "raise pp or ep"),
        ({"training.micro_batch_size": 4, **FULL}, "raise tp, pp or zero, or training.micro_batch_size 1"),
    ],
)
def test_settings_at_their_maximum_are_not_named(own: dict[str, object], advice: str) -> None:
    assert memory_advice(load_job(None, {**JOB, **own})) == advice
