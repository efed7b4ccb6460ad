"""TRL's script: what it says of a plan, read back and by TRL's and accelerate's own classes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpctl.cli.emit import for_launcher
from mpctl.cli.options import JobSource
from mpctl.core.errors import InputError
from mpctl.interop.command_line import read_flags
from mpctl.interop.emitted import emit_plan
from mpctl.interop.peft_keys import DEFAULT_TARGETS
from mpctl.interop.shell import read_script
from mpctl.interop.trl import read_trl
from mpctl.plan.planning.plan import load_plan
from tests.interop.jobs import MIXTURE, Settings
from tests.interop.tuned import JOBS, LORA, QLORA, SHARDED, facts, tuned

EVERY = {**JOBS, **SHARDED}
CLUSTER: Settings = {"cluster": "dgx-h100"}


def files_of(settings: Settings) -> dict[str, dict[str, Any]]:
    """The configs that the script writes."""
    script = read_script(emit_plan(tuned(settings), "trl").text)
    return {name: yaml.safe_load(text) for name, text in script.documents.items()}


@pytest.mark.parametrize("name", EVERY)
def test_what_is_written_is_read_as_the_same_job(name: str) -> None:
    plan = tuned(EVERY[name])
    read = read_flags("trl", emit_plan(plan, "trl").text, CLUSTER)
    again = load_plan(None, {**CLUSTER, **read.settings})
    assert facts(again) == facts(plan)
    is_deepspeed = name in ("full, zero 1", "moments on the host")
    assert again.job.training.runtime == ("deepspeed" if is_deepspeed else "trl")


@pytest.mark.parametrize("name", EVERY)
def test_trl_and_accelerate_take_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import FullyShardedDataParallelPlugin
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

    plan, files = tuned(EVERY[name]), files_of(EVERY[name])
    sft = {**files["sft.yaml"], "use_cpu": True, "bf16": False}  # no GPU here
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(sft))
    _, trained, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config(
        ["--config", str(path)], fail_with_unknown_args=True
    )
    job = plan.job
    assert job.model is not None
    assert (trained.max_length, trained.max_steps) == (job.model.seq_length, job.training.steps)
    batch = trained.per_device_train_batch_size * trained.gradient_accumulation_steps * job.sizes["dp"]
    assert batch == job.training.global_batch_size
    if adapter := job.training.adapter:
        assert (model.use_peft, model.lora_r, model.lora_alpha) == (True, adapter.rank, adapter.alpha)
        assert model.load_in_4bit == (adapter.stored_as == "nf4")
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(files["accelerate.yaml"]))
    config = load_config_from_file(str(path))
    assert config.num_processes == job.world_size
    of_fsdp = {f"fsdp_{field.name}" for field in fields(FullyShardedDataParallelPlugin)} | {"fsdp_offload_params"}
    assert {*config.fsdp_config} <= of_fsdp | {"fsdp_version"}


def test_peft_makes_the_adapter() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    sft = files_of(JOBS["dora"])["sft.yaml"]
    names = {"lora_r": "r", "lora_target_modules": "target_modules", "lora_modules_to_save": "modules_to_save"}
    kept = {names.get(key, key): value for key, value in sft.items() if key.startswith(("lora_", "use_dora", "use_rs"))}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **kept)
    assert (config.r, config.lora_alpha, config.use_dora) == (16, 32, True)


def test_who_shards() -> None:
    kinds = {name: files_of(JOBS[name])["accelerate.yaml"]["distributed_type"] for name in JOBS}
    assert (kinds["lora"], kinds["lora, replicas"], kinds["lora alone"]) == ("FSDP", "MULTI_GPU", "NO")
    assert (kinds["full, zero 1"], kinds["moments on the host"]) == ("DEEPSPEED", "DEEPSPEED")
    host = files_of(JOBS["on the host"])["accelerate.yaml"]
    assert host["fsdp_config"]["fsdp_offload_params"] is True


def test_the_base_is_read_in_its_type_and_the_trained_in_fp32() -> None:
    assert files_of(JOBS["full"])["sft.yaml"]["dtype"] == "float32"
    assert files_of(JOBS["lora"])["sft.yaml"]["dtype"] == "bfloat16"
    assert files_of(JOBS["qlora"])["sft.yaml"]["bnb_4bit_quant_storage"] == "bfloat16"
    pure = {"parallel.zero": 3, "training.master_weights": False, "training.gradient_dtype": "bf16"}
    assert files_of(pure)["sft.yaml"]["dtype"] == "bfloat16"


def test_a_rank_of_mpctls_launcher_gets_both_configs() -> None:
    emitted = emit_plan(tuned(LORA), "trl")
    assert json.loads(emitted.config)["lora_r"] == 16
    assert emitted.variables["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    moments = emit_plan(tuned(JOBS["moments on the host"]), "trl").variables
    assert moments["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"parallel.pp": 2}, "parallel.pp"),
        ({"parallel.tp": 2}, "parallel.tp"),
        ({**MIXTURE, "model": "mixtral-8x7b", "parallel.ep": 2}, "parallel.ep"),
        ({"training.recompute": "selective"}, "training.recompute"),
        ({**LORA, "training.adapter.base_precision": "fp8"}, "training.adapter.base_precision"),
        ({**LORA, "training.adapter.base_precision": "int8"}, "training.adapter.base_precision"),
        ({**LORA, "training.adapter.alpha": 24.5}, "training.adapter.alpha"),
        ({**LORA, "training.adapter.dtype": "bf16"}, "training.adapter.dtype"),
        ({**QLORA, "training.adapter.dtype": "fp32"}, "training.adapter.dtype"),
        ({**LORA, "training.adapter.targets": ["attention.qkv"]}, "training.adapter.targets"),
        ({"training.offload_optimizer": True}, "training.offload_optimizer"),
        ({"training.optimizer": "sgd", "training.momentum": 0.9}, "training.momentum"),
        ({"training.optimizer_dtype": "bf16"}, "training.optimizer_dtype"),
        ({"parallel.zero": 1, "training.master_weights": False}, "training.master_weights"),
        ({"training.lr_schedule": "wsd", "training.lr_wsd_decay_steps": 9}, "training.lr_wsd_decay_style"),
        ({"training.lr_decay_steps": 9000}, "training.lr_decay_steps"),
        ({"parallel.cp": 2}, "parallel.cp"),
    ],
)
def test_what_trl_cannot_say(settings: Settings, where: str) -> None:
    with pytest.raises(InputError) as caught:
        emit_plan(tuned(settings), "trl")
    assert where in [issue.where for issue in caught.value.issues]


LINE = """#!/bin/bash
trl sft --model_name_or_path Qwen/Qwen2.5-7B --dataset_name trl-lib/Capybara --max_length 4096 --packing \\
  --use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj v_proj --accelerate_config zero2 \\
  --num_processes 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --optim adamw_8bit \\
  --eval_strategy steps --unknown 3 --output_dir $OUT
"""


def test_trls_own_command() -> None:
    read = read_flags("trl", LINE, CLUSTER)
    s = read.settings
    assert (s["model"], s["model.seq_length"], s["parallel.zero"]) == ("Qwen/Qwen2.5-7B", 4096, 2)
    assert (s["cluster.gpus_per_node"], s["training.global_batch_size"]) == (4, 64)
    assert (s["training.adapter.rank"], s["training.adapter.alpha"]) == (32, 16)
    assert (s["training.optimizer"], s["training.recompute"], s["training.dtype"]) == ("adamw-8bit", "full", "bf16")
    told = {warning.rule: warning.message for warning in read.warnings}
    assert "unknown 3" in told["trl-changes"] and "eval_strategy" in told["trl-flags"]


PYTHON = """
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))
peft = LoraConfig(r=64, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
args = SFTConfig(max_length=512, per_device_train_batch_size=4, gradient_checkpointing=False, packing=True)
"""


def test_a_script_in_python() -> None:
    s = read_trl(PYTHON).settings
    assert (s["training.adapter.kind"], s["training.adapter.rank"]) == ("qlora", 64)
    assert s["training.adapter.targets"] == ["q_proj", "v_proj"]
    assert (s["model.seq_length"], s["training.recompute"]) == (512, "none")
    assert s["training.adapter.double_quantization"] is True


def test_what_the_data_decides_is_left_out() -> None:
    read = read_trl("{max_length: 512, max_steps: -1, num_train_epochs: 3, warmup_steps: 0.03}")
    assert "training.steps" not in read.settings and read.settings["training.warmup_steps"] == 0
    assert "trl-nearest" in [warning.rule for warning in read.warnings]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{max_length: 10, optim: galore_adamw}", "'galore_adamw' is none of those"),
        ("{a: 1}", "model_name_or_path"),
        ("{max_length: x}", "'x' is not an integer"),
    ],
)
def test_what_no_setting_says_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_trl(text)
    assert message in "\n".join(map(str, caught.value.issues))


@pytest.mark.parametrize("target", ["trl", "axolotl", "llama-factory"])
def test_the_model_is_the_one_that_was_named(target: str) -> None:
    named = emit_plan(tuned({**LORA, "model": "meta-llama/Meta-Llama-3-8B-Instruct"}), target)
    assert "Meta-Llama-3-8B-Instruct" in named.body and "as its preset says" not in named.text
    preset = emit_plan(tuned(LORA), target)
    assert "meta-llama/Meta-Llama-3-8B\n" in preset.body.replace('"', "")
    assert "the model is meta-llama/Meta-Llama-3-8B, as its preset says" in " ".join(preset.notes)


UNSLOTH = """
length = 4096
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", max_seq_length=length, load_in_4bit=True,
                                                     dtype=None, gpu_memory_utilization=usage)
model = FastLanguageModel.get_peft_model(model, r=8, target_modules=["q_proj", "v_proj"], lora_alpha=24,
    lora_dropout=0, bias="none", use_gradient_checkpointing="unsloth", random_state=3407)
trainer = SFTTrainer(model=model, tokenizer=tokenizer, args=SFTConfig(per_device_train_batch_size=2, lr=rate))
"""


def test_a_script_of_unsloth() -> None:
    read = read_trl(UNSLOTH)
    s = read.settings
    assert (s["model"], s["model.seq_length"], s["training.runtime"]) == ("unsloth/Llama-3.2-1B", 4096, "unsloth")
    adapter = {key.rsplit(".", 1)[-1]: value for key, value in s.items() if key.startswith("training.adapter.")}
    assert (adapter["kind"], adapter["rank"], adapter["alpha"], adapter["dropout"]) == ("qlora", 8, 24, 0.0)
    assert (adapter["targets"], adapter["dtype"]) == (["q_proj", "v_proj"], "fp32")
    told = {warning.rule: warning.message for warning in read.warnings}
    assert "SFTConfig.lr rate" in told["trl-changes"] and "random_state" not in told["trl-changes"]


def test_common_names_of_a_script() -> None:
    text = 'NAME = "Qwen/Qwen2.5-7B"\nmodel = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype=torch.bfloat16)\n'
    s = read_trl(text + "SFTTrainer(model=model, max_seq_length=777, peft_config=LoraConfig(r=4))").settings
    assert (s["model"], s["model.seq_length"], s["training.adapter.rank"]) == ("Qwen/Qwen2.5-7B", 777, 4)
    assert "training.adapter.base_precision" not in s
    assert read_trl('SFTTrainer(model="Qwen/Qwen2.5-7B")').settings["model"] == "Qwen/Qwen2.5-7B"
    assert read_trl("{max_seq_length: 300, torch_dtype: bfloat16}").settings["model.seq_length"] == 300


def test_a_base_without_a_dtype_is_read_in_fp32() -> None:
    read = read_trl(
        "{model_name_or_path: Qwen/Qwen2.5-7B, use_peft: true, group_by_length: false, task_type: CAUSAL_LM}"
    )
    assert read.settings["training.adapter.base_precision"] == "fp32"
    told = {warning.rule: warning for warning in read.warnings}
    assert "trl-changes" not in told
    assert any("base_precision=bf16" in warning.hint for warning in read.warnings)


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("{model_name_or_path: Qwen/Qwen2.5-7B, use_peft: true}", ["q_proj", "v_proj"]),
        ("{model_name_or_path: gpt2, use_peft: true}", ["c_attn"]),
        ('SFTTrainer(model="meta-llama/Llama-3.1-8B", peft_config=LoraConfig(r=4))', ["q_proj", "v_proj"]),
        ("{model_name_or_path: Qwen/Qwen2.5-7B, use_peft: true, lora_target_modules: all-linear}", ["all-linear"]),
        ("FastLanguageModel.from_pretrained('a/b')\nFastLanguageModel.get_peft_model(model, r=8)", None),
    ],
)
def test_without_targets_pefts_are_planned(text: str, targets: list[str] | None) -> None:
    """peft 0.21, utils/constants.py; Unsloth's get_peft_model names all seven modules of Llama's layers."""
    read = read_trl(text)
    assert read.settings.get("training.adapter.targets") == targets
    told = [warning.message for warning in read.warnings if "PEFT's default" in warning.message]
    assert bool(told) == (targets not in (None, ["all-linear"]))
    if targets is None:
        assert read.settings["training.adapter.dropout"] == 0.0


def test_pefts_own_table_has_the_same_targets() -> None:
    constants = pytest.importorskip("peft.utils.constants", reason="peft is not installed")
    table = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    types = {"gpt2": "gpt2", "bloom": "bloom", "falcon": "falcon", "pythia": "gpt_neox", "neox": "gpt_neox"}
    for part, names in DEFAULT_TARGETS.items():
        for kind in [types.get(part, "phi")] if part else ("llama", "mistral", "mixtral", "gemma2", "qwen2", "qwen3"):
            assert table[kind] == list(names)


@pytest.mark.parametrize("peft", ["", ", peft_config=LoraConfig(r=4, target_modules='all-linear')"])
def test_a_model_that_the_script_loads_has_the_type_of_its_files(peft: str) -> None:
    """transformers 5, modeling_utils.py: from_pretrained without a dtype is dtype auto."""
    model = 'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")\n'
    own = read_trl(f"{model}SFTTrainer(model=model, max_length=512{peft})")
    assert "training.adapter.base_precision" not in own.settings
    assert own.settings.get("training.optimizer_dtype") == (None if peft else "bf16")
    assert any("auto" in warning.message for warning in own.warnings)
    named = read_trl(f'SFTTrainer(model="Qwen/Qwen2.5-7B", max_length=512{peft})')
    assert named.settings.get("training.adapter.base_precision") == ("fp32" if peft else None)
    assert "training.optimizer_dtype" not in named.settings


def test_types_of_another_launcher_are_not_a_users() -> None:
    read = {"training.adapter.dtype": "fp32", "model": "llama-3-8b", "training.master_weights": False}
    job = JobSource(None, read, typed={"model": "llama-3-8b"}, read=("axolotl", ""))
    assert "training.adapter.dtype" not in for_launcher(job, "trl").overrides
    assert for_launcher(job, "axolotl").overrides["training.adapter.dtype"] == "fp32"


def test_a_note_on_types_only_where_they_differ_from_the_plan() -> None:
    assert "plan them so by" not in " ".join(emit_plan(tuned(LORA), "trl").notes)
    notes = " ".join(emit_plan(tuned(QLORA), "trl").notes)
    assert "A and B are bf16 there" in notes and "--set training.adapter.dtype=bf16" in notes


def test_devices_before_ampere_have_no_flash_attention_2() -> None:
    old = {"cluster.device": "t4", "training.dtype": "fp16", "parallel.zero": 0}
    for target, word in (("trl", "sdpa"), ("axolotl", "sdpa"), ("llama-factory", "sdpa")):
        assert f": {word}\n" in emit_plan(tuned({**LORA, **old}), target).body
    assert "attn_implementation: flash_attention_2\n" in emit_plan(tuned(LORA), "trl").body
