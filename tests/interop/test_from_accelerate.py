"""accelerate's configs and launch lines read back: what --emit writes, their own forms, what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.interop.changes import launch_changes
from mpctl.interop.command_line import read_flags
from mpctl.interop.emitted import emit_plan
from mpctl.interop.from_accelerate import read_accelerate
from mpctl.plan.planning.plan import load_plan
from tests.interop.jobs import Settings, plan_of
from tests.interop.test_accelerate import SHARDED, WHOLE

BATCH = ("training.micro_batch_size", "training.global_batch_size")


def facts(plan: Any) -> dict[str, object]:
    job = plan.job
    return {
        **{axis: job.sizes[axis] for axis in ("tp", "cp", "dp")},
        "zero": (job.parallel.zero, job.parallel.zero_size),
        "training": (job.training.dtype, job.training.recompute),
    }


@pytest.mark.parametrize("name", {**SHARDED, **WHOLE})
def test_what_is_written_is_read_as_the_same_layout(name: str) -> None:
    settings = {**SHARDED, **WHOLE}[name]
    plan = plan_of(settings)
    read = dict(read_accelerate(emit_plan(plan, "accelerate").text).settings)
    assert read.pop("training.runtime") == "fsdp2"
    assert facts(plan_of({"training.dtype": "fp32", **read})) == facts(plan)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "{distributed_type: FSDP, num_processes: 8, mixed_precision: fp16, "
            "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}}",
            {"parallel.zero": 2, "training.runtime": "fsdp", "training.dtype": "fp16", "cluster.gpus_per_node": 8},
        ),
        (
            "{distributed_type: FSDP, num_machines: 2, num_processes: 16, "
            "fsdp_config: {fsdp_sharding_strategy: 4, fsdp_activation_checkpointing: true}}",
            {"parallel.zero": 3, "parallel.zero_size": 8, "training.recompute": "full"},
        ),
        (
            "{distributed_type: DEEPSPEED, num_processes: 8, deepspeed_config: {zero_stage: 1}}",
            {"parallel.zero": 1, "training.runtime": "deepspeed"},
        ),
        (
            "{distributed_type: MEGATRON_LM, num_processes: 8, megatron_lm_config: {megatron_lm_tp_degree: 2, "
            "megatron_lm_pp_degree: 2, megatron_lm_sequence_parallelism: true, "
            "megatron_lm_use_distributed_optimizer: true}}",
            {"parallel.tp": 2, "parallel.pp": 2, "parallel.zero": 1, "parallel.sequence_parallel": True},
        ),
        (
            "{distributed_type: FSDP, num_processes: 8, fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}}",
            {"training.offload_optimizer": True, "training.offload_parameters": True},
        ),
        (
            "{distributed_type: DEEPSPEED, num_processes: 8, deepspeed_config: {zero_stage: 2, "
            "offload_optimizer_device: cpu, offload_param_device: none}}",
            {"training.offload_optimizer": True, "training.offload_parameters": None},
        ),
        ("{distributed_type: MULTI_GPU, num_processes: 4}", {"parallel.zero": 0, "cluster.gpus_per_node": 4}),
    ],
)
def test_plug_ins_are_read(text: str, wanted: dict[str, object]) -> None:
    read = read_accelerate(text).settings
    assert {key: read.get(key) for key in wanted} == wanted


MEGATRON = {
    "tp_degree": 2,
    "pp_degree": 2,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 4,
    "recompute_granularity": "selective",
    "use_distributed_optimizer": "true",
    "optimizer_cpu_offload": "true",
    "gradient_clipping": 0.5,
    "hidden_dropout": 0.1,
    "num_micro_batches": 8,
    "no_save_optim": "true",
}


def of_megatron(keys: dict[str, Any]) -> str:
    table = ", ".join(f"megatron_lm_{key}: {value}" for key, value in keys.items())
    return (
        "{distributed_type: MEGATRON_LM, num_processes: 16, per_device_train_batch_size: 2, "
        f"megatron_lm_config: {{{table}}}}}"
    )


def test_every_key_of_megatron_is_read_or_named() -> None:
    read = read_accelerate(of_megatron({**MEGATRON, "attention_backend": "true"}))
    wanted = {
        **{"parallel.tp": 2, "parallel.pp": 2, "parallel.cp": 1, "parallel.ep": 4, "parallel.zero": 1},
        **{"training.recompute": "selective", "training.offload_optimizer": True, "training.clip_norm": 0.5},
        **{"training.dropout": 0.1, "training.global_batch_size": 2 * 8 * 4},
    }
    assert {key: read.settings.get(key) for key in wanted} == wanted
    told = {warning.rule: warning.message for warning in read.warnings}
    assert {*told} == {"accelerate-changes"}
    assert "attention_backend true" in told["accelerate-changes"] and "no_save_optim" not in told["accelerate-changes"]


def test_megatron_without_its_keys_has_accelerates_defaults() -> None:
    """MegatronLMPlugin (accelerate 1.15): context_parallel_size 2, recompute_granularity full, and
    recompute_activations in no argument of Megatron-LM."""
    read = read_accelerate(of_megatron({"recompute_activations": "true", "use_custom_fsdp": "true"}))
    assert (read.settings["parallel.cp"], read.settings["training.recompute"]) == (2, "full")
    told = " ".join(warning.message for warning in read.warnings)
    named = ("context_parallel_size", "recompute_activations changes nothing", "use_custom_fsdp")
    assert all(f"megatron_lm_{name}" in told for name in named)


def test_zero_3_of_deepspeed_is_planned_as_the_trainers() -> None:
    text = "{distributed_type: DEEPSPEED, num_processes: 8, mixed_precision: bf16, deepspeed_config: {zero_stage: 3}}"
    job: Settings = {"model": "llama-3-8b", "cluster.device": "a100-80gb"}
    plan = load_plan(None, {**job, **read_accelerate(text).settings})
    assert "runtime-runs" not in [check.rule for check in plan.checks]


LINE = "accelerate launch --use_fsdp --num_processes 8 --mixed_precision bf16 --fsdp_version 2 train.py "
LINE += "--model_name_or_path gpt2 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --output_dir $OUT"


def test_a_launch_line_has_the_scripts_batch_and_model() -> None:
    job = load_plan(None, {**read_flags("accelerate", LINE).settings, "cluster": "dgx-h100"}).job
    assert (job.training.micro_batch_size, job.training.global_batch_size, job.parallel.zero) == (2, 64, 3)
    assert job.model is not None and job.model.layers == 12


def test_what_is_not_read_is_named() -> None:
    read = read_flags("accelerate", f"{LINE} --learning_rate 1e-4 --optim adamw_8bit --use_peft --own_flag 3")
    assert read.settings["training.optimizer"] == "adamw-8bit" and read.settings["training.learning_rate"] == 1e-4
    told = {warning.rule: (warning.message, warning.hint) for warning in read.warnings}
    assert "own_flag 3" in told["accelerate-changes"][0] and "output_dir" in told["accelerate-flags"][0]
    assert "--from trl" in told["accelerate-nearest"][1]


def test_a_changed_micro_batch_is_the_scripts() -> None:
    old = plan_of({"parallel.zero": 3, "training.micro_batch_size": 1, "training.global_batch_size": 64}).job
    new = old.model_copy(update={"training": old.training.model_copy(update={"micro_batch_size": 2})})
    changes = launch_changes("accelerate", old, new).changes
    assert [change.text for change in changes] == ["micro batch, in the script 1 -> 2"]


def test_changes_of_a_config_function_are_its_keys() -> None:
    old = load_plan(None, {"model": "llama-3-8b", "cluster": "dgx-h100", "cluster.nodes": 1, "parallel.zero": 3}).job
    new = load_plan(None, {**SHARDED["tp dp"], "model": "llama-3-8b", "cluster": "dgx-h100", "cluster.nodes": 1}).job
    keys = {change.key: change.new for change in launch_changes("torchtitan", old, new).changes}
    assert keys["ParallelismConfig.tensor_parallel_degree"] == "4" and "config.parallelism" not in keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{distributed_type: DEEPSPEED, num_processes: 8, deepspeed_config: {offload_param_device: nvme}}",
            "nvme: states on a disk",
        ),
        ("{distributed_type: TPU_POD, num_processes: 8}", "'TPU_POD' is not read"),
        ("{distributed_type: FSDP, num_machines: 3, num_processes: 8}", "do not divide over 3"),
        (
            "{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: z.json}}",
            "--from deepspeed @z.json",
        ),
        (of_megatron({"recompute_granularity": "some"}), "use selective or full"),
        (of_megatron({"recompute_method": "block", "recompute_num_layers": 4}), "block with 4 layers"),
        ("{a: 1}", "distributed_type"),
        ("{distributed_type: FSDP, num_processes: x}", "'x' is not an integer"),
    ],
)
def test_what_no_setting_says_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_accelerate(text)
    assert message in "\n".join(map(str, caught.value.issues))
