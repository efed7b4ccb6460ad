"""DeepSpeed's configuration: read by its own class and topology where it is installed.

By hand: deepspeed's source package, hjson, py-cpuinfo, msgpack and einops on the path (`pip install
--no-deps --target DIR`); nothing is compiled. What needs it is skipped elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.interop.emitted import emit_plan
from mpctl.plan.planning.plan import Plan
from tests.interop.jobs import MIXTURE, Settings, plan_of
from tests.interop.snippets import assigned_in, calls_in, fields_of
from tests.interop.test_megatron import refusals

LAYOUTS: dict[str, Settings] = {
    "replicas": {"training.dtype": "bf16"},
    "zero 3": {"parallel.zero": 3, "training.dtype": "fp16", "training.micro_batch_size": 2},
    "mics": {"parallel.zero": 3, "parallel.zero_size": 8, "training.dtype": "bf16"},
    "autotp": {"parallel.tp": 4, "parallel.zero": 2},
    "ulysses": {"parallel.cp": 4, "parallel.zero": 1, "training.dtype": "bf16"},
    "pipeline": {"parallel.tp": 2, "parallel.pp": 4, "parallel.zero": 1},
    "recompute": {"parallel.pp": 2, "training.recompute": "full"},
    "offload": {"training.recompute": "full", "training.offload_activations": True},
    "experts": {**MIXTURE, "parallel.ep": 8, "parallel.zero": 2, "training.dtype": "bf16"},
    "experts and ulysses": {**MIXTURE, "parallel.ep": 4, "parallel.cp": 2, "parallel.zero": 1},
}


def config_of(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = assigned_in(emit_plan(plan, "deepspeed").text)["ds_config"]
    return config


@pytest.mark.parametrize("name", LAYOUTS)
def test_batch_and_sizes(name: str) -> None:
    plan = plan_of(LAYOUTS[name])
    job, config = plan.job, config_of(plan)
    assert config["train_batch_size"] == (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * job.sizes["dp"]
    )
    assert config["zero_optimization"]["stage"] == job.parallel.zero
    assert config["zero_optimization"].get("mics_shard_size") == job.parallel.zero_size
    calls = calls_in(emit_plan(plan, "deepspeed").text)
    if job.parallel.pp > 1:
        topology = calls["PipeModelDataParallelTopology"]
        assert set(topology) == fields_of("deepspeed", "PipeModelDataParallelTopology")
        assert topology == {"num_pp": job.sizes["pp"], "num_mp": job.sizes["tp"], "num_dp": job.sizes["dp"]}
        assert set(calls["PipelineModule"]) <= fields_of("deepspeed", "PipelineModule")
    elif job.parallel.tp > 1:
        assert config["tensor_parallel"] == {"autotp_size": job.parallel.tp}
    assert config.get("expert_parallel", {}).get("autoep_size", 1) == job.parallel.ep


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_own_classes_agree(name: str) -> None:
    reason = "deepspeed is not installed"
    configs = pytest.importorskip("deepspeed.runtime.config", reason=reason, exc_type=ImportError)
    pipe = pytest.importorskip("deepspeed.runtime.pipe.topology", exc_type=ImportError)
    plan = plan_of(LAYOUTS[name])
    job, config = plan.job, config_of(plan)

    read = configs.DeepSpeedConfig({**config, "train_batch_size": None})  # of one process
    read.world_size, read.train_batch_size = job.sizes["dp"], config["train_batch_size"]
    read._batch_assertion()
    assert read.gradient_accumulation_steps == job.num_microbatches
    assert read.zero_optimization_stage == job.parallel.zero
    if job.parallel.pp > 1:
        sizes = calls_in(emit_plan(plan, "deepspeed").text)["PipeModelDataParallelTopology"]
        theirs, ours = pipe.PipeModelDataParallelTopology(**sizes), plan.require_legal()
        for axis, name_there in (("tp", "model"), ("dp", "data"), ("pp", "pipe")):
            groups = [list(group) for group in ours.groups(axis)]
            assert sorted(theirs.get_axis_comm_lists(name_there)) == sorted(groups)


@pytest.mark.parametrize("name", ["experts", "experts and ulysses"])
def test_its_own_groups_of_experts_are_the_plan_s(name: str) -> None:
    folding = pytest.importorskip(
        "deepspeed.module_inject.auto_ep_folding", reason="deepspeed is not installed", exc_type=ImportError
    )
    configs = pytest.importorskip("deepspeed.module_inject.auto_ep_config", exc_type=ImportError)
    plan = plan_of(LAYOUTS[name])
    job, ours = plan.job, plan.require_legal()
    read = configs.parse_autoep_config(config_of(plan)["expert_parallel"])
    spec = folding.build_folding_spec(
        world_size=job.world_size,
        pp_size=1,
        tp_size=1,
        ep_size=read.autoep_size,
        etp_size=read.expert_tensor_parallel_size,
    )
    folding.validate_folding_global(spec)
    theirs = folding.expected_folding_group_tables(spec)
    assert [tuple(group) for group in ours.groups("ep")] == list(theirs.ep_groups)
    assert sorted(tuple(g) for g in ours.groups("edp")) == sorted(theirs.edp_groups)


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"parallel.cp": 2, "parallel.pp": 2}, {"emit-cp"}),
        ({"parallel.cp": 2, "parallel.tp": 2}, {"emit-cp"}),
        ({"parallel.cp": 16}, {"emit-cp"}),
        ({"parallel.pp": 4, "parallel.vpp": 3}, {"emit-vpp"}),
        ({"parallel.pp": 2, "parallel.zero": 2}, {"emit-zero"}),
        ({"parallel.zero": 1, "parallel.zero_size": 8}, {"emit-zero-size"}),
        ({"parallel.tp": 2, "parallel.zero": 3}, {"emit-zero"}),
        ({"parallel.tp": 2, "parallel.sequence_parallel": True}, {"emit-sequence-parallel"}),
        ({"training.recompute": "selective"}, {"emit-recompute"}),
        ({"parallel.pp": 4, "parallel.first_stage_layers": 6}, {"emit-first-stage-layers"}),
        ({"training.dtype": "fp16", "training.loss_scale": 1000.0}, {"emit-loss-scale"}),
        ({**MIXTURE, "parallel.ep": 2, "parallel.pp": 2}, {"emit-ep"}),
        ({**MIXTURE, "parallel.etp": 2}, {"emit-etp"}),
        ({**MIXTURE, "model.router_score": "sigmoid", "model.router_bias": True}, {"emit-router-bias"}),
    ],
)
def test_what_it_cannot_say(settings: Settings, rules: set[str]) -> None:
    assert set(refusals(settings, "deepspeed")) == rules
