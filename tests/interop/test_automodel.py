"""NeMo AutoModel's recipe: what it says of a plan, read back and by its own dataclasses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import yaml

from mpctl.core.errors import InputError
from mpctl.interop.automodel import read_automodel
from mpctl.interop.emitted import emit_plan
from mpctl.plan.planning.plan import load_plan
from tests.interop.jobs import Settings
from tests.interop.tuned import JOBS, LORA, QLORA, SHARDED, facts, tuned

NAMES = ("full", "lora", "lora alone", "lora, replicas", "dora", "qlora, nested", "two nodes", "linear", "constant")
EVERY: dict[str, Settings] = {
    **{name: JOBS[name] for name in NAMES},
    **SHARDED,
    "qlora": QLORA,
    "tp": {**LORA, "parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.zero": 2},
    "fp32 adapters": {**LORA, "training.adapter.dtype": "fp32", "training.adapter.dropout": 0.1},
    "attention": {**LORA, "training.adapter.targets": ["attention"]},
    "bf16 alone": {"parallel.zero": 3, "training.master_weights": False},
}


def config_of(settings: Settings) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(emit_plan(tuned(settings), "automodel").text)
    return config


@pytest.mark.parametrize("name", EVERY)
def test_what_is_written_is_read_as_the_same_job(name: str) -> None:
    plan = tuned(EVERY[name])
    ranks = {"cluster.nodes": plan.job.cluster.nodes, "cluster.gpus_per_node": plan.job.cluster.gpus_per_node}
    read = read_automodel(emit_plan(plan, "automodel").text, ranks)
    again = load_plan(None, {"cluster": "dgx-h100", **ranks, **read.settings})
    assert facts(again) == facts(plan)
    assert again.job.parallel.sequence_parallel == plan.job.parallel.sequence_parallel
    assert {warning.rule for warning in read.warnings} <= {"automodel-flags"}


@pytest.mark.parametrize("name", ["full", "lora", "dora", "qlora", "tp"])
def test_every_key_is_a_field_of_its_dataclasses(name: str) -> None:
    lora = pytest.importorskip("nemo_automodel.components._peft.lora", reason="nemo-automodel is not installed")
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from nemo_automodel.components.optim.optimizer import AdamWConfig, LRSchedulerConfig
    from nemo_automodel.components.training.step_scheduler import StepSchedulerConfig

    classes = {
        "peft": (lora.PeftConfig,),
        "distributed": (FSDP2Config, ParallelismSizes),
        "optimizer": (AdamWConfig,),
        "lr_scheduler": (LRSchedulerConfig,),
        "step_scheduler": (StepSchedulerConfig,),
    }
    config, others = config_of(EVERY[name]), {"_target_", "strategy", "local_batch_size"}
    lora.ModuleMatcher(*(config.get("peft", {}).get(key, []) for key in ("target_modules", "exclude_modules")))
    for part, types in classes.items():
        names = {field.name for each in types for field in fields(each)}
        assert {*config.get(part, {})} <= names | others, part


OWN = """
step_scheduler: {global_batch_size: 64, local_batch_size: 8, num_epochs: 1}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: gpt2}
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, target_modules: ["*.c_attn"], dropout: 0.1}
distributed: {strategy: fsdp2, dp_size: none, tp_size: 1, enable_compile: true}
dataset: {_target_: d, seq_length: 832}
optimizer: {_target_: torch.optim.Adam, betas: [0.9, 0.98], lr: 1.0e-5}
"""


def test_a_recipe_in_its_own_form() -> None:
    read = read_automodel(OWN)
    s = read.settings
    assert (s["training.adapter.rank"], s["training.adapter.alpha"], s["training.adapter.targets"]) == (
        8,
        32,
        ["c_attn"],
    )
    assert (s["training.adapter.dtype"], s["parallel.zero"], s["model.seq_length"]) == ("bf16", 3, 832)
    assert (s["training.beta2"], s["training.runtime"]) == (0.98, "fsdp2-automodel")
    told = " ".join(warning.message for warning in read.warnings)
    assert all(word in told for word in ("enable_compile true", "dropout_position", "packed_sequence"))


@pytest.mark.parametrize(
    ("distributed", "setting", "value"),
    [
        ("activation_checkpointing: full", "training.recompute", "full"),
        ("activation_checkpointing: selective", "training.recompute", "selective"),
        ("activation_checkpointing: true", "training.recompute", "full"),
        ("activation_checkpointing: false", "training.recompute", "none"),
        ("ep_size: 8", "parallel.ep", 8),
        ("pp_size: 4", "parallel.zero", 2),
        ("pp_size: 4, reshard_after_forward: true", "parallel.zero", 3),
        ("ep_size: 8", "parallel.zero", 2),
        ("ep_size: 8, moe: {reshard_after_forward: true}", "parallel.zero", 3),
        ("tp_size: 2", "parallel.zero", 3),
        ("tp_size: 2, reshard_after_forward: false", "parallel.zero", 2),
    ],
)
def test_words_and_defaults_of_distributed(distributed: str, setting: str, value: object) -> None:
    """FSDP2Config and MoEParallelizerConfig of components/distributed/config.py."""
    read = read_automodel(f"{{distributed: {{{distributed}}}}}")
    assert read.settings[setting] == value
    assert not any(warning.rule == "automodel-changes" for warning in read.warnings)


def test_betas_that_are_no_numbers() -> None:
    with pytest.raises(InputError, match=r"'x' is not a number"):
        read_automodel("{step_scheduler: {local_batch_size: 1}, optimizer: {betas: [x, y]}}")


def test_which_modules() -> None:
    """Its matcher has all of all linear modules, the head too, or takes some out, not both."""
    peft = config_of(LORA)["peft"]
    assert peft["exclude_modules"] == ["*lm_head*"] and not {"match_all_linear", "target_modules"} & {*peft}
    text = "{step_scheduler: {local_batch_size: 1}, model: {}, peft: {match_all_linear: true}}"
    assert read_automodel(text).settings["training.adapter.targets"] == ["all-linear", "lm_head"]


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"parallel.pp": 2}, "parallel.pp"),
        ({**QLORA, "parallel.tp": 2}, "parallel.tp"),
        ({**LORA, "training.adapter.rslora": True}, "training.adapter.rslora"),
        ({**LORA, "training.adapter.modules_to_save": ["lm_head"]}, "training.adapter.modules_to_save"),
        ({"training.optimizer": "adamw-8bit"}, "training.optimizer"),
        ({"parallel.zero": 0, "parallel.tp": 2}, "parallel.zero"),
    ],
)
def test_what_it_cannot_say(settings: Settings, where: str) -> None:
    with pytest.raises(InputError) as caught:
        emit_plan(tuned(settings), "automodel")
    assert where in [issue.where for issue in caught.value.issues]
