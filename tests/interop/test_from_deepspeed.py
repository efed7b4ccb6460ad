"""DeepSpeed's configurations read: the runtime, and what each key says."""

from __future__ import annotations

import pytest

from mpctl.interop.deepspeed import read_deepspeed
from mpctl.interop.emitted import get_launcher
from mpctl.plan.planning.plan import load_plan
from tests.interop.jobs import Settings, plan_of

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


def told(text: str) -> tuple[Settings, dict[str, str]]:
    """The settings of a configuration, and its warnings by rule and key."""
    read = read_deepspeed(text)
    return dict(read.settings), {f"{warning.rule} {warning.where}": warning.message for warning in read.warnings}


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ('"bfloat16": {"enabled": true}', {"training.dtype": "bf16"}),
        ('"torch_autocast": {"enabled": true, "dtype": "bfloat16"}', {"training.dtype": "bf16"}),
        ('"torch_autocast": {"enabled": false, "dtype": "bfloat16"}', {"training.dtype": "fp32"}),
        ('"optimizer": {"type": "Lion"}', {"training.optimizer": "lion"}),
        (
            '"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}',
            {"training.optimizer": "sgd", "training.momentum": 0.9},
        ),
        (
            '"bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}',
            {"training.master_weights": False, "training.gradient_dtype": "bf16", "training.optimizer_dtype": "bf16"},
        ),
    ],
)
def test_precision_and_optimizer(table: str, wanted: Settings) -> None:
    settings, warnings = told(f'{{"train_batch_size": 64, "zero_optimization": {{"stage": 2}}, {table}}}')
    assert {key: settings.get(key) for key in wanted} == wanted
    assert "deepspeed-changes --from" not in warnings
    assert load_plan(None, {**JOB, **settings}).job.training.optimizer == settings["training.optimizer"]


def test_every_key_is_read_or_named() -> None:
    _, warnings = told("""{"train_batch_size": 64, "zero_optimization": {"stage": 2, "cpu_offload": true},
      "optimizer": {"type": "Lamb", "params": {"freeze_step": 9}}, "data_efficiency": {"enabled": false, "seed": 1},
      "compile": {"deepcompile": true}, "steps_per_print": 10, "scheduler": {"type": "WarmupLR"}}""")
    changes = warnings["deepspeed-changes --from"]
    named = ("cpu_offload true", "freeze_step 9", "compile.deepcompile true")
    assert all(name in changes for name in named) and "seed" not in changes
    assert "Lamb: planned as AdamW" in warnings["deepspeed-nearest optimizer.type"]
    ignored = warnings["deepspeed-flags --from"]
    assert "steps_per_print" in ignored and "scheduler.type" in ignored


def test_the_checkpointing_table_is_planned_with_a_warning() -> None:
    settings, warnings = told('{"train_batch_size": 64, "activation_checkpointing": {"cpu_checkpointing": false}}')
    assert settings["training.recompute"] == "full"
    assert "deepspeed.checkpointing decide" in warnings["deepspeed-nearest activation_checkpointing"]
    pipeline = 'ds_config = {"train_batch_size": 64, "activation_checkpointing": {"cpu_checkpointing": False}}\n'
    pipeline += "PipelineModule(layers, activation_checkpoint_interval=0, num_stages=4)\nprint(a, sep=1)"
    settings, warnings = told(pipeline)
    assert "training.recompute" not in settings
    assert "num_stages 4" in warnings["deepspeed-changes --from"] and "sep" not in str(warnings)


@pytest.mark.parametrize(("stage", "rules"), [(2, {"emit-offload-fraction"}), (3, set())])
def test_a_share_of_the_states_needs_zero_3(stage: int, rules: set[str]) -> None:
    settings = {"parallel.zero": stage, "training.offload_optimizer": True, "training.offload_fraction": 0.5}
    plan = plan_of({**settings, "training.dtype": "bf16"})
    assert {issue.rule for issue in get_launcher("deepspeed").refusals(plan)} == rules
