"""torchtitan's config: its fields, its own classes, groups and stages where it is installed.

By hand: `pip install --no-deps torchtitan==0.3.0 tyro docstring-parser typeguard shtab
spmd_types==0.2.3`; what needs it is skipped elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from mpctl.interop.registry import emit_plan
from mpctl.planning.plan import Plan
from tests.interop.jobs import EXAMPLE, LLAMA, Settings, plan_of
from tests.interop.snippets import assigned_in, calls_in, fields_of
from tests.interop.test_megatron import refusals
from tests.interop.test_torch_mesh import fake_ranks

SHAPE: Settings = {
    "model.position": "rotary", "model.norm": "rmsnorm", "model.activation": "swiglu",
    "model.bias": False, "model.tied_embeddings": False, "training.dtype": "bf16",
}  # fmt: skip
LAYOUTS: dict[str, Settings] = {
    "replicas": {},
    "tp dp": {"parallel.tp": 4, "parallel.zero": 3, "parallel.sequence_parallel": True},
    "all": {"parallel.tp": 2, "parallel.cp": 2, "parallel.pp": 2, "parallel.zero": 1},
    "chunks": {"parallel.pp": 4, "parallel.vpp": 3, "parallel.zero": 2},
    "by cost": {"parallel.pp": 4, "parallel.stage_balance": "cost", "model.vocab": 4000},
    "ends": {"parallel.pp": 4, "parallel.first_stage_layers": 2, "parallel.last_stage_layers": 4},
    "ends as layers": {
        "model.layers": 14, "parallel.pp": 4, "parallel.embedding_is_layer": True,
        "parallel.loss_is_layer": True,
    },
    "recompute": {"training.recompute": "full", "training.micro_batch_size": 2},
    "gpipe": {"parallel.pp": 4, "parallel.schedule": "gpipe"},
}  # fmt: skip


def said(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of ParallelismConfig, and what is assigned to config.training."""
    text = emit_plan(plan, "torchtitan").text
    training = {
        name.removeprefix("config.training."): value
        for name, value in assigned_in(text).items() if name.startswith("config.training.")
    }  # fmt: skip
    return calls_in(text)["ParallelismConfig"], training


@pytest.mark.parametrize("name", LAYOUTS)
def test_fields_sizes_and_batch(name: str) -> None:
    plan = plan_of({**SHAPE, **LAYOUTS[name]})
    job, (sizes, training) = plan.job, said(plan)
    assert set(sizes) <= fields_of("torchtitan", "ParallelismConfig")
    assert set(training) <= fields_of("torchtitan", "TrainingConfig")
    ways = ("data_parallel_shard_degree", "data_parallel_replicate_degree")
    assert sizes[ways[0]] * sizes[ways[1]] == job.sizes["dp"]
    passes = job.num_microbatches if job.parallel.pp == 1 else 1
    local = training["local_batch_size"]
    assert local * passes * job.sizes["dp"] == training["global_batch_size"]


def test_the_example_is_a_config_of_its_own() -> None:
    emitted = emit_plan(plan_of({}, base=EXAMPLE), "torchtitan")
    sizes, training = said(plan_of({}, base=EXAMPLE))
    assert sizes["pipeline_parallel_layers_per_stage"] == 4
    assert sizes["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert training["local_batch_size"] == 64
    assert "config = llama3_70b()\n    return lay_out(config)" in emitted.body
    assert any(note.startswith("approximated: SelectiveAC") for note in emitted.notes)
    other = emit_plan(plan_of({"model.layers": 40}, base=LLAMA), "torchtitan")
    assert "llama3_70b" not in other.body
    assert any("no config of this model" in note for note in other.notes)


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"parallel.zero": 1}, {"emit-zero"}),
        ({"parallel.cp": 2}, {"emit-zero"}),
        ({"parallel.tp": 2, "parallel.pp": 2, "parallel.order": "tp-cp-pp-dp"}, {"emit-order"}),
        ({"training.dtype": "fp16"}, {"emit-dtype"}),
        ({"training.dropout": 0.1}, {"emit-dropout"}),
        ({"model.position": "learned", "model.norm": "layernorm"},
         {"emit-position", "emit-norm"}),
    ],
)  # fmt: skip
def test_what_it_cannot_say(settings: Settings, rules: set[str]) -> None:
    assert set(refusals({**SHAPE, **settings}, "torchtitan")) == rules


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_own_classes_have_the_plan_s_groups_and_stages(name: str) -> None:
    reason = "torchtitan is not installed"
    configs = pytest.importorskip("torchtitan.config.configs", reason=reason, exc_type=ImportError)
    dims = pytest.importorskip(
        "torchtitan.distributed.parallel_dims", reason=reason, exc_type=ImportError
    )
    plan = plan_of({**SHAPE, **LAYOUTS[name]})
    job, topology = plan.job, plan.require_legal()
    sizes, training = said(plan)
    config = configs.ParallelismConfig(**sizes)
    configs.TrainingConfig(**training)
    for rank in fake_ranks(topology.world_size):
        made = dims.ParallelDims.from_config(config, topology.world_size)
        assert (made.tp, made.cp, made.pp) == (job.sizes["tp"], job.sizes["cp"], job.sizes["pp"])
        made.build_mesh()
        for axis in ("tp", "cp", "pp"):
            if job.sizes[axis] > 1:
                group = made.get_mesh(axis).get_group()
                assert dist.get_process_group_ranks(group) == list(topology.group(rank, axis))
