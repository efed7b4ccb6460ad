"""Axolotl's YAML: what it says of a plan, read back and by Axolotl's own schema."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from mpctl.core.errors import InputError
from mpctl.interop.axolotl import read_axolotl
from mpctl.interop.emitted import emit_plan
from mpctl.plan.planning.plan import load_plan
from tests.interop.jobs import Settings
from tests.interop.tuned import JOBS, LORA, QLORA, SHARDED, facts, tuned

ONE_ROW: Settings = {"training.micro_batch_size": 1}
EVERY: dict[str, Settings] = {
    **JOBS,
    "hybrid": SHARDED["hybrid"],
    "cp": {**SHARDED["cp"], **ONE_ROW},
    "tp": {**LORA, "parallel.tp": 2, "parallel.zero": 2},
    "inputs on the host": {"parallel.zero": 3, "training.offload_activations": True},
    "gptq": {**LORA, "parallel.zero": 0, "training.adapter.base_precision": "int4-gptq"},
    "bf16 adapters": {**LORA, "parallel.zero": 0, "training.adapter.dtype": "bf16"},
}


def config_of(settings: Settings) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(emit_plan(tuned(settings), "axolotl").text)
    return config


@pytest.mark.parametrize("name", EVERY)
def test_what_is_written_is_read_as_the_same_job(name: str) -> None:
    plan = tuned(EVERY[name])
    ranks = {"cluster.nodes": plan.job.cluster.nodes, "cluster.gpus_per_node": plan.job.cluster.gpus_per_node}
    read = read_axolotl(emit_plan(plan, "axolotl").text, ranks)
    again = load_plan(None, {"cluster": "dgx-h100", **ranks, **read.settings})
    assert facts(again) == facts(plan)
    assert again.job.training.offload_activations == plan.job.training.offload_activations
    assert {warning.rule for warning in read.warnings} <= {"axolotl-flags"}


@pytest.mark.parametrize(
    "name", [name for name in EVERY if name != "cp"]
)  # whose schema imports ring_flash_attn, of CUDA alone
def test_axolotl_takes_it(name: str) -> None:
    schema = pytest.importorskip("axolotl.utils.schemas.config", reason="axolotl is not installed")
    written = config_of(EVERY[name])
    known = schema.AxolotlInputConfig.model_fields
    assert {*written} <= {*known}  # a wrong name passes its parser
    assert {*written.get("fsdp_config", {})} <= {*known["fsdp_config"].annotation.__args__[0].model_fields}
    config = schema.AxolotlInputConfig(**written)
    adapter, job = tuned(EVERY[name]).job.training.adapter, tuned(EVERY[name]).job
    assert job.model is not None
    assert (config.sequence_len, config.micro_batch_size) == (job.model.seq_length, job.training.micro_batch_size)
    if adapter:
        assert (config.lora_r, config.lora_alpha) == (adapter.rank, adapter.alpha or 2 * adapter.rank)
        assert bool(config.load_in_4bit) == (adapter.stored_as == "nf4")


@pytest.mark.parametrize(("fsdp", "stage"), [("[]", 0), ("false", 0), ("[full_shard, auto_wrap]", 3)])
def test_an_empty_fsdp_is_none(fsdp: str, stage: int) -> None:
    settings = read_axolotl(f"{{base_model: Qwen/Qwen2.5-7B, fsdp: {fsdp}}}", {}).settings
    assert settings.get("parallel.zero", 0) == stage


def test_full_training_without_fsdp_has_bf16_states() -> None:
    text = "{base_model: gpt2, bf16: auto, micro_batch_size: 2, gradient_checkpointing: true}"
    s = read_axolotl(text, {}).settings
    assert (s["training.master_weights"], s["training.optimizer_dtype"]) == (False, "bf16")
    sharded = read_axolotl(text[:-1] + ", fsdp_version: 2, fsdp_config: {reshard_after_forward: false}}", {}).settings
    assert "training.master_weights" not in sharded and sharded["parallel.zero"] == 2


OWN = """
base_model: meta-llama/Llama-3.2-1B
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
adapter: qlora
sequence_len: 2048
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
flash_attention: true
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json
warmup_ratio: 0.1
saves_per_epoch: 1
weight_decay: 0.0
plugins: [axolotl.integrations.liger.LigerPlugin]
"""


def test_a_config_in_axolotls_own_form() -> None:
    read = read_axolotl(OWN, {"cluster.nodes": 1, "cluster.gpus_per_node": 4})
    s = read.settings
    assert (s["training.adapter.kind"], s["training.adapter.rank"], s["training.optimizer"]) == (
        "qlora",
        32,
        "adamw-8bit",
    )
    assert (s["parallel.zero"], s["training.offload_optimizer"], s["training.offload_parameters"]) == (3, True, True)
    assert (s["training.global_batch_size"], s["training.lr_schedule"]) == (32, "cosine")
    told = {warning.rule: warning.message for warning in read.warnings}
    assert "LigerPlugin" in told["axolotl-changes"]
    assert all(word in told["axolotl-flags"] for word in ("val_set_size", "num_epochs", "saves_per_epoch"))
    assert "zero3_bf16_cpuoffload_all.json" in told["axolotl-nearest"]


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"parallel.pp": 2}, "parallel.pp"),
        ({**QLORA, "parallel.tp": 2}, "parallel.tp"),
        ({**LORA, "parallel.tp": 2, "parallel.zero": 0}, "parallel.tp"),
        ({**LORA, "training.adapter.base_precision": "fp32"}, "training.adapter.base_precision"),
        ({**LORA, "training.adapter.dtype": "bf16"}, "training.adapter.dtype"),
        ({"training.master_weights": True}, "training.master_weights"),
        (SHARDED["cp"], "training.micro_batch_size"),
    ],
)
def test_what_axolotl_cannot_say(settings: Settings, where: str) -> None:
    with pytest.raises(InputError) as caught:
        emit_plan(tuned(settings), "axolotl")
    assert where in [issue.where for issue in caught.value.issues]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{base_model: gpt2, adapter: llama-adapter}", "'llama-adapter' is not planned"),
        ("{base_model: gpt2, rl: dpo}", "supervised"),
        ("{base_model: gpt2, deepspeed: own.json}", "is another file"),
        ("{base_model: gpt2, deepspeed: {zero_optimization: {offload_param: {device: nvme}}}}", "on a disk"),
        ("{micro_batch_size: 2}", "base_model"),
    ],
)
def test_what_no_setting_says_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_axolotl(text, {})
    assert message in "\n".join(map(str, caught.value.issues))
