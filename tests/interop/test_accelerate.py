"""accelerate's config file: read by accelerate itself, its mesh against the plan's topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from mpctl.interop.emitted import emit_plan
from mpctl.plan.planning.plan import Plan
from tests.interop.jobs import LLAMA, MIXTURE, Settings, plan_of
from tests.interop.test_megatron import refusals
from tests.interop.test_torch_mesh import fake_ranks

SHARDED: dict[str, Settings] = {
    "dp": {"parallel.zero": 3},
    "tp dp": {"parallel.tp": 4, "parallel.zero": 2},
    "tp cp dp": {"parallel.tp": 2, "parallel.cp": 4, "parallel.zero": 3, "training.dtype": "bf16"},
    "cp alone": {"parallel.tp": 8, "parallel.cp": 2, "parallel.zero": 3},
    "recompute": {"parallel.tp": 2, "parallel.zero": 3, "training.recompute": "full"},
    "hybrid": {"parallel.tp": 2, "parallel.cp": 2, "parallel.zero": 3, "parallel.zero_size": 4},
}
WHOLE: dict[str, Settings] = {
    "replicas": {},
    "tp alone": {"parallel.tp": 8, "cluster.nodes": 1},
    "one": {"cluster.nodes": 1, "cluster.gpus_per_node": 1},
}


def config_of(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(emit_plan(plan, "accelerate").text)
    return config


@pytest.mark.parametrize("name", SHARDED)
def test_the_sizes_multiply_to_the_processes(name: str) -> None:
    config, product = config_of(plan_of(SHARDED[name])), 1
    for key, size in config["parallelism_config"].items():
        product *= size if key.endswith("_size") else 1
    assert product == config["num_processes"] == 16
    assert config["distributed_type"] == "FSDP"


@pytest.mark.parametrize("name", {**SHARDED, **WHOLE})
def test_accelerate_reads_the_file_and_builds_the_groups_of_the_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File -> its ClusterConfig -> the environment of a worker -> its ParallelismConfig -> mesh."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate import ParallelismConfig
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_extend_env_parallelism_config

    plan = plan_of({**SHARDED, **WHOLE}[name])
    file = tmp_path / "accelerate.yaml"
    file.write_text(emit_plan(plan, "accelerate").text)
    config = load_config_from_file(str(file))
    job, topology = plan.job, plan.require_legal()
    assert (config.num_processes, config.num_machines) == (job.world_size, job.cluster.nodes)
    assert config.mixed_precision == ("bf16" if job.training.dtype == "bf16" else "no")
    if not config.parallelism_config:
        assert name in ("replicas", "one")
        return
    arguments = launch_command_parser().parse_args(["script.py"])
    vars(arguments).update(config.parallelism_config)
    for key, value in prepare_extend_env_parallelism_config(arguments, {}).items():
        monkeypatch.setenv(key, value)
    for rank in fake_ranks(topology.world_size):
        sizes = ParallelismConfig()
        mesh = sizes.get_device_mesh("cpu")
        assert sizes.total_size == job.world_size
        for axis in set(mesh.mesh_dim_names) & {"tp", "cp"}:
            members = dist.get_process_group_ranks(mesh.get_group(axis))
            assert members == list(topology.group(rank, axis))
        if job.parallel.zero:
            shards = dist.get_process_group_ranks(mesh["dp_shard_cp"].get_group())
            own = "zero" if job.parallel.zero_size else "dp_cp"
            assert shards == list(topology.group(rank, own))


def test_the_stage_of_zero_is_whether_parameters_are_sharded_again() -> None:
    by_stage = {stage: config_of(plan_of({"parallel.zero": stage}))["fsdp_config"] for stage in (2, 3)}
    assert not by_stage[2]["fsdp_reshard_after_forward"]
    assert by_stage[3]["fsdp_reshard_after_forward"]


def test_the_example_without_its_pipeline() -> None:
    settings = {"parallel.tp": 4, "parallel.cp": 2, "parallel.zero": 3}
    emitted = emit_plan(plan_of(settings, base=LLAMA), "accelerate")
    config = yaml.safe_load(emitted.text)
    assert (config["num_machines"], config["num_processes"]) == (8, 64)
    assert config["parallelism_config"]["parallelism_config_dp_shard_size"] == 8
    assert any("gradient_accumulation_steps=16" in note for note in emitted.notes)


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"parallel.pp": 2}, {"emit-pp"}),
        ({"parallel.zero": 1}, {"emit-zero"}),
        ({"parallel.cp": 2}, {"emit-zero"}),
        ({"parallel.tp": 2}, {"emit-zero"}),
        ({"parallel.tp": 2, "parallel.zero": 3, "parallel.sequence_parallel": True}, {"emit-sequence-parallel"}),
        ({"training.recompute": "selective"}, {"emit-recompute"}),
        ({"parallel.tp": 2, "parallel.zero": 2, "parallel.order": "tp-dp-cp-pp", "parallel.cp": 2}, {"emit-order"}),
        ({**MIXTURE, "parallel.ep": 2}, {"emit-ep"}),
    ],
)
def test_what_accelerate_cannot_say(settings: Settings, rules: set[str]) -> None:
    assert set(refusals(settings, "accelerate")) == rules
