"""LLaMA-Factory's YAML: what it says of a plan, read back and by LLaMA-Factory's own parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from mpctl.core.errors import InputError
from mpctl.interop.emitted import emit_plan
from mpctl.interop.llama_factory import read_llama_factory
from mpctl.plan.planning.plan import load_plan
from tests.interop.jobs import Settings
from tests.interop.tuned import JOBS, LORA, SHARDED, facts, tuned

BEYOND = ("full in fp32", "on the host")
EVERY: dict[str, Settings] = {
    **{name: settings for name, settings in JOBS.items() if name not in BEYOND},
    "parameters on the host": JOBS["on the host"],
    "bf16 alone": {"parallel.zero": 0, "training.master_weights": False},
}


def config_of(settings: Settings) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(emit_plan(tuned(settings), "llama-factory").text)
    return config


@pytest.mark.parametrize("name", EVERY)
def test_what_is_written_is_read_as_the_same_job(name: str) -> None:
    plan = tuned(EVERY[name])
    ranks = {"cluster.nodes": plan.job.cluster.nodes, "cluster.gpus_per_node": plan.job.cluster.gpus_per_node}
    read = read_llama_factory(emit_plan(plan, "llama-factory").text, ranks)
    again = load_plan(None, {"cluster": "dgx-h100", **ranks, **read.settings})
    assert facts(again) == facts(plan)
    assert {warning.rule for warning in read.warnings} <= {"llama-factory-flags"}


@pytest.mark.parametrize("name", EVERY)
def test_llama_factory_takes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")  # it pins an older transformers
    hparams = pytest.importorskip("llamafactory.hparams", reason="llamafactory is not installed")
    from transformers import HfArgumentParser, TrainingArguments

    config = config_of(EVERY[name])
    deepspeed = config.pop("deepspeed", None)  # a package that is asked for where it is named
    classes = (hparams.ModelArguments, hparams.DataArguments, hparams.FinetuningArguments, TrainingArguments)
    model, data, tuning, training = HfArgumentParser(classes).parse_dict({**config, "bf16": False, "use_cpu": True})
    job, adapter = tuned(EVERY[name]).job, tuned(EVERY[name]).job.training.adapter
    assert job.model is not None
    length = data.cutoff_len + data.packing  # which takes one off, and pads to it
    assert (length, training.max_steps) == (job.model.seq_length, job.training.steps)
    assert model.disable_gradient_checkpointing == (job.training.recompute == "none")
    if adapter:
        assert (tuning.lora_rank, tuning.lora_alpha) == (adapter.rank, adapter.alpha)
        assert model.quantization_bit == {"nf4": 4, "int8": 8}.get(adapter.stored_as or "")
    assert (deepspeed["zero_optimization"]["stage"] if deepspeed else 0) == (job.parallel.zero if deepspeed else 0)


def test_deepspeed_takes_its_table() -> None:
    runtime = pytest.importorskip("deepspeed.runtime.zero.config", reason="deepspeed is not installed")
    table = config_of(EVERY["parameters on the host"])["deepspeed"]
    zero = runtime.DeepSpeedZeroConfig(**table["zero_optimization"])
    assert (zero.stage, zero.offload_optimizer.device, zero.offload_param.device) == (3, "cpu", "cpu")


OWN = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
    "quantization_bit": 4,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "q_proj, v_proj",
    "deepspeed": "examples/deepspeed/ds_z2_config.json",
    "dataset": "identity,alpaca_en_demo",
    "template": "llama3",
    "cutoff_len": 2048,
    "max_samples": 1000,
    "output_dir": "saves",
    "plot_loss": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "enable_liger_kernel": True,
    "val_size": 0.1,
}


def test_a_config_in_its_own_form() -> None:
    read = read_llama_factory(json.dumps(OWN), {"cluster.nodes": 1, "cluster.gpus_per_node": 4})
    s = read.settings
    assert (s["training.adapter.kind"], s["training.adapter.rank"], s["parallel.zero"]) == ("qlora", 8, 2)
    assert s["training.adapter.targets"] == ["q_proj", "v_proj"]
    assert (s["training.global_batch_size"], s["training.recompute"]) == (32, "full")
    assert s["training.runtime"] == "deepspeed"
    unsloth = read_llama_factory("{stage: sft, use_unsloth: true}", {}).settings
    assert unsloth["training.runtime"] == "unsloth"
    told = {warning.rule: warning.message for warning in read.warnings}
    assert (s["training.cross_entropy"], unsloth.get("training.cross_entropy")) == ("linear", None)
    assert "llama-factory-changes" not in told
    assert all(word in told["llama-factory-flags"] for word in ("max_samples", "plot_loss", "val_size"))


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (JOBS["full in fp32"], "training.dtype"),
        (SHARDED["cp"], "parallel.cp"),
        (SHARDED["hybrid"], "parallel.zero_size"),
        ({**LORA, "training.adapter.base_precision": "int8"}, "training.adapter.base_precision"),
        ({"parallel.zero": 2, "training.offload_parameters": True}, "training.offload_parameters"),
    ],
)
def test_what_it_cannot_say(settings: Settings, where: str) -> None:
    with pytest.raises(InputError) as caught:
        emit_plan(tuned(settings), "llama-factory")
    assert where in [issue.where for issue in caught.value.issues]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{stage: dpo}", "supervised"),
        ("{stage: sft, finetuning_type: freeze}", "'freeze' is not planned"),
        ("{stage: sft, quantization_bit: 3}", "3 is not planned"),
        ("{a: 1}", "stage"),
    ],
)
def test_what_no_setting_says_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_llama_factory(text, {})
    assert message in "\n".join(map(str, caught.value.issues))
