"""What runs beside experts' rows, and how many there is room for, written and read back."""

from typing import Any

import pytest

from mpctl import load_plan
from mpctl.interop.emitted import emit_plan
from mpctl.interop.from_bridge import read_bridge
from mpctl.interop.from_megatron import read_megatron

JOB: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "model.seq_length": 4096,
    "cluster": "dgx-gb200",
    "cluster.nodes": 16,
    "parallel.ep": 32,
    "parallel.zero": 1,
    "training.global_batch_size": 1024,
    "training.runtime": "megatron-bridge-26.06",
}
ROOM = {
    "training.moe_overlap": True,
    "training.moe_dispatcher": "hybridep",
    "training.moe_capacity": 4.0,
    "training.moe_stash": 1.5,
    "training.moe_stash_host": 1.0,
}


@pytest.mark.parametrize("launcher", ["megatron", "megatron-bridge"])
def test_flags_of_experts_are_read_back(launcher: str) -> None:
    plan = load_plan(None, {**JOB, **ROOM})
    assert not plan.errors
    emitted = emit_plan(plan, launcher)
    if launcher == "megatron-bridge":
        assert "planned for Megatron-Core, CUDA graph of a whole iteration" in " ".join(emitted.notes)
    read = (read_megatron if launcher == "megatron" else read_bridge)(emitted.body)
    assert {key: read.settings[key] for key in ROOM} == ROOM
    named = ("overlap_moe_expert_parallel_comm", "moe_expert_rank_capacity_factor", "moe_paged_stash")
    dashed = emitted.body.replace("-", "_")
    assert [name for name in named if name not in dashed] == []
    assert not [w for w in read.warnings if any(name in str(w.issue).replace("-", "_") for name in named)]


@pytest.mark.parametrize(("overlaps", "connections"), [(True, 32), (False, 1)])
def test_overlapped_experts_have_several_connections(overlaps: bool, connections: int) -> None:
    split = {"parallel.tp": 2, "parallel.sequence_parallel": True, "training.runtime": "megatron-core"}
    plan = load_plan(None, {**JOB, **split, "training.moe_overlap": overlaps})
    assert f"\nCUDA_DEVICE_MAX_CONNECTIONS={connections} torchrun" in emit_plan(plan, "megatron").text


def test_a_plan_without_them_writes_none() -> None:
    body = emit_plan(load_plan(None, {**JOB, "training.moe_dispatcher": "hybridep"}), "megatron-bridge").body
    assert "overlap_moe" not in body
    assert "paged_stash" not in body
    assert "capacity" not in body


def test_bridge_reads_a_forced_balance_and_refuses_a_dispatcher_that_no_job_has() -> None:
    fields = "cfg.model.tensor_model_parallel_size = 1\ncfg.model.moe_router_force_load_balancing = True\n"
    assert read_bridge(fields, {"model": "qwen3-30b-a3b"}).settings["training.moe_load"] == 1.0
    with pytest.raises(Exception, match="ncclep"):
        read_bridge(f"{fields}cfg.model.moe_flex_dispatcher_backend = 'ncclep'\n")
