"""Megatron-LM's optimizers, read and written."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.interop.config_text import python_value
from mpctl.interop.deepspeed import LIMITS as DEEPSPEED
from mpctl.interop.deepspeed import ROWS as DEEPSPEED_ROWS
from mpctl.interop.emitted import emit_plan
from mpctl.interop.from_bridge import read_bridge
from mpctl.interop.from_megatron import read_megatron
from mpctl.interop.mapping import written
from mpctl.interop.megatron import megatron_refusals
from mpctl.interop.megatron_optimizers import optimizer_fields
from mpctl.plan.planning.plan import make_plan
from mpctl.spec.load import load_job

SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --vocab-size 1000 --bf16 --use-distributed-optimizer "
)
RANKS = {"cluster.nodes": 1, "cluster.gpus_per_node": 8, "cluster.device": "h100-sxm"}
AWARE = "--use-precision-aware-optimizer "
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "muon": (
        "--optimizer muon --muon-nesterov --muon-momentum 0.95 --muon-no-split-qkv --muon-tp-mode duplicated "
        "--muon-num-ns-steps 10 --muon-scale-mode shape_scaling --muon-extra-scale-factor 0.2",
        {"optimizer": "muon", "muon.nesterov": True, "muon.split_qkv": False, "muon.steps": 10},
    ),
    "narrow": (
        AWARE + "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16",
        {"optimizer_dtype": "bf16", "gradient_dtype": "bf16"},
    ),
    "fp8": (AWARE + "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", {"optimizer_dtype": "fp8"}),
    "offload": (
        AWARE + "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d",
        {"offload_optimizer": True, "offload_fraction": 0.5, "offload_overlap": True},
    ),
}
OPTIMIZERS = tuple(f"training.{key}" for key in ("optimizer", "offload", "muon", "gradient_dtype"))


def settings_of(flags: str) -> dict[str, Any]:
    return dict(read_megatron(SHAPE + flags).settings)


@pytest.mark.parametrize("kind", CASES)
def test_flags_come_back(kind: str) -> None:
    flags, expected = CASES[kind]
    read = settings_of(flags)
    assert {key: read[f"training.{key}"] for key in expected} == expected
    plan = make_plan(load_job(None, {**read, **RANKS}))
    plan.require_legal()
    again = read_megatron(emit_plan(plan, "megatron").text).settings
    table = {key for key in {*read, *again} if key.startswith(OPTIMIZERS)}
    assert {key: again.get(key) for key in table} == {key: read.get(key) for key in table}


def test_what_megatron_ends_on_is_refused() -> None:
    for flags, where in (
        ("--exp-avg-dtype bf16", "--exp-avg-dtype"),
        ("--optimizer-cpu-offload", "--optimizer-cpu-offload"),
        ("--optimizer soap", "--optimizer"),
    ):
        with pytest.raises(InputError) as error:
            read_megatron(SHAPE + flags)
        assert [issue.where for issue in error.value.issues] == [where]


def test_moments_of_two_types_are_planned_as_the_wider() -> None:
    read = read_megatron(SHAPE + AWARE + "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16")
    assert read.settings["training.optimizer_dtype"] == "fp16"
    assert [warning.where for warning in read.warnings] == ["--exp-avg-sq-dtype"]


def test_bridge_moments_need_the_precision_aware_optimizer_and_are_planned_as_the_wider() -> None:
    text = "cfg.model.tensor_model_parallel_size = 2\ncfg.optimizer.exp_avg_dtype = torch.bfloat16\n"
    with pytest.raises(InputError) as error:
        read_bridge(text, {"model": "gpt2"})
    assert [issue.where for issue in error.value.issues] == ["optimizer.exp_avg_dtype"]
    aware = "cfg.optimizer.use_precision_aware_optimizer = True\ncfg.optimizer.main_params_dtype = torch.float16\n"
    read = read_bridge(text + aware, {"model": "gpt2"})
    assert read.settings["training.optimizer_dtype"] == "fp32"
    where = {warning.where for warning in read.warnings}
    assert where == {"optimizer.exp_avg_sq_dtype", "optimizer.main_params_dtype"}


def test_offloaded_moments_are_fp32() -> None:
    """Megatron-LM's HybridDeviceOptimizer is given no data type of moments."""
    line = SHAPE + AWARE + "--optimizer-cpu-offload "
    assert "training.optimizer_dtype" not in read_megatron(line).settings
    narrow = read_megatron(line + "--exp-avg-dtype bf16")
    assert "training.optimizer_dtype" not in narrow.settings
    assert [warning.where for warning in narrow.warnings] == ["--exp-avg-dtype"]
    plan = make_plan(load_job(None, {**read_megatron(line).settings, **RANKS, "training.optimizer_dtype": "bf16"}))
    assert [issue.where for issue in megatron_refusals(plan)] == ["training.optimizer_dtype"]


@pytest.mark.parametrize(
    ("settings", "flag", "gradients"),
    [
        ({"dtype": "bf16"}, "", None),
        ({"dtype": "fp8"}, "--grad-reduce-in-bf16", "bf16"),
        ({"dtype": "fp8", "gradient_dtype": "fp32"}, "", "fp32"),
        ({"dtype": "fp16"}, "", "fp16"),
        ({"dtype": "fp16", "gradient_dtype": "fp32"}, "--accumulate-allreduce-grads-in-fp32", "fp32"),
    ],
)
def test_gradients_are_written_as_they_are_counted(settings: dict[str, Any], flag: str, gradients: str | None) -> None:
    """Megatron-Core's profile counts 2 bytes in fp8 and fp16; without a flag Megatron-LM reduces those of fp8 in 4."""
    base = {**settings_of(""), **RANKS, **{f"training.{key}": value for key, value in settings.items()}}
    plan = make_plan(load_job(None, base))
    text = emit_plan(plan, "megatron").text
    found = [word for word in text.split() if word.startswith(("--grad-reduce", "--accumulate"))]
    assert found == ([flag] if flag else [])
    read = read_megatron(text).settings
    assert read.get("training.gradient_dtype") == gradients
    again = make_plan(load_job(None, {**read, **RANKS}))
    assert again.estimate.memory[0].gradient_bytes == plan.estimate.memory[0].gradient_bytes


def test_layouts_without_complete_matrices_or_the_distributed_optimizer() -> None:
    for settings, where in (
        ({"training.optimizer": "muon", "parallel.zero": 3}, "parallel.zero"),
        ({"training.optimizer_dtype": "bf16", "parallel.zero": 0}, "training.optimizer_dtype"),
    ):
        plan = make_plan(load_job(None, {**settings_of(""), **RANKS, **settings}))
        assert [issue.where for issue in megatron_refusals(plan)] == [where]


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon", "muon.split_qkv": False, "muon.scale_mode": "shape_scaling", "muon.momentum": 0.9},
        {"offload_optimizer": True, "offload_fraction": 0.5, "offload_overlap": True},
        {"optimizer_dtype": "bf16", "gradient_dtype": "bf16"},
        {"optimizer_dtype": "fp8"},
    ],
)
def test_bridges_fields_come_back(settings: dict[str, Any]) -> None:
    named = {f"training.{key}": value for key, value in settings.items()}
    job = load_job(None, {**settings_of(""), **RANKS, **named})
    text = "\n".join(f"cfg.optimizer.{key} = {python_value(value)}" for key, value in optimizer_fields(job))
    read = read_bridge(f"cfg.model.tensor_model_parallel_size = 2\n{text}", {"model": "gpt2"})
    assert {key: read.settings[key] for key in named} == named
    assert ("training.optimizer_dtype" in read.settings) == ("optimizer_dtype" in settings)  # not of offloaded states
    assert read.warnings == ()


def test_deepspeed_has_the_share_alone() -> None:
    base = {**settings_of(""), **RANKS, "training.offload_optimizer": True, "parallel.zero": 3}
    del base["training.cross_entropy"]  # Megatron's; DeepSpeed has no key for it
    half = make_plan(load_job(None, {**base, "training.offload_fraction": 0.5}))
    assert dict(written(half.job, DEEPSPEED_ROWS))["zero_optimization.offload_optimizer.ratio"] == 0.5
    overlapped = make_plan(load_job(None, {**base, "training.offload_overlap": True}))
    assert [i.where for i in DEEPSPEED.refusals(overlapped)] == ["training.offload_overlap"]
