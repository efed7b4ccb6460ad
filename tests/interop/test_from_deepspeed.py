"""DeepSpeed's configurations read: the runtime, and what each key says."""

from __future__ import annotations

import pytest

from mpctl.interop.deepspeed import read_deepspeed
from mpctl.plan.planning.plan import load_plan
from tests.interop.jobs import Settings

JOB: Settings = {"model": "llama-3-8b", "cluster.nodes": 1, "cluster.gpus_per_node": 8, "cluster.device": "a100-80gb"}


@pytest.mark.parametrize(
    ("stage", "typed", "runtime"),
    [(3, {}, "deepspeed"), (1, {}, "deepspeed"), (1, {"parallel.pp": 4}, "megatron-deepspeed")],
)
def test_the_runtime_runs_what_is_read(stage: int, typed: Settings, runtime: str) -> None:
    text = f'{{"train_batch_size": 256, "bf16": {{"enabled": true}}, "zero_optimization": {{"stage": {stage}}}}}'
    read = read_deepspeed(text, typed).settings
    assert read["training.runtime"] == runtime
    plan = load_plan(None, {**JOB, **read, **typed})
    assert "runtime-runs" not in [check.rule for check in plan.checks]
