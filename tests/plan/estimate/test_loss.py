"""Ways to compute a loss: bytes and products by hand, each runtime's own, and contexts of a million tokens."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.flops import model_and_hardware_flops, step_flops
from mpctl.plan.estimate.loss import loss_passes
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.spec.load import load_job
from mpctl.spec.presets import preset_names
from mpctl.spec.runtime import MemoryPasses, get_profile

SMALL: dict[str, Any] = {
    "cluster": "dgx-h100",
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 1,
    "model.layers": 2,
    "model.hidden": 512,
    "model.heads": 8,
    "model.vocab": 65_536,
    "model.seq_length": 4096,
    "training.micro_batch_size": 1,
    "training.dtype": "bf16",
    "training.runtime": "megatron-core",
}
TOKENS, WORDS, WIDTH = 4096, 65_536, 512
LOGITS = TOKENS * WORDS


def plan_of(settings: dict[str, Any], **more: Any) -> Plan:
    plan = make_plan(load_job(None, {**settings, **{key.replace("__", "."): value for key, value in more.items()}}))
    plan.require_legal()
    return plan


def held(**more: Any) -> int:
    """Bytes of tensors, most of which are the logits'."""
    return max(stage.tensor_bytes for stage in plan_of(SMALL, **more).estimate.memory)


def test_bytes_of_a_logit_by_way() -> None:
    """Megatron's fused loss keeps bf16 logits and their softmax in float32, as an unfused one does; torchtitan's own
    holds an eighth of them, of 14 bytes."""
    fused = held()
    assert fused == held(training__cross_entropy="fused") == held(training__cross_entropy="unfused")
    one = held(
        training__runtime="megatron-core-graphs", training__cross_entropy="linear", training__cross_entropy_chunks=1
    )
    many = held(
        training__runtime="megatron-core-graphs", training__cross_entropy="linear", training__cross_entropy_chunks=8
    )
    assert one - many == pytest.approx(6 * LOGITS * 7 / 8, rel=0.02)
    titan = {"training__runtime": "torchtitan", "training__recompute": "full"}
    whole = held(**titan, training__cross_entropy="unfused")
    assert whole - held(**titan) == pytest.approx(14 * LOGITS * 7 / 8, rel=0.02)


def test_the_own_way_of_a_runtime_is_its_default() -> None:
    ways = {name: get_profile(name).memory.cross_entropy for name in preset_names("runtimes")}
    assert {name: ways[name] for name in ("trl", "torchtitan", "megatron-core", "megatron-2021")} == {
        "trl": "linear",
        "torchtitan": "linear",
        "megatron-core": "fused",
        "megatron-2021": "unfused",
    }
    for name in ("mpctl", "megatron-core", "torchtitan"):
        profile = get_profile(name)
        assert ways[name] in profile.runs.cross_entropy
        own = plan_of(SMALL, training__runtime=name, training__cross_entropy=ways[name]).estimate
        assert own.step_seconds == plan_of(SMALL, training__runtime=name).estimate.step_seconds
        assert own.device_bytes == plan_of(SMALL, training__runtime=name).estimate.device_bytes


def test_logits_that_backward_makes_again_are_a_fourth_product() -> None:
    once = 2 * TOKENS * WORDS * WIDTH
    for runtime, again in (("mpctl", 1), ("torchtitan", 0)):
        layout, whole = (
            JobLayout.of(load_job(None, {**SMALL, "training.runtime": runtime, "training.cross_entropy": way}))
            for way in ("linear", "unfused" if runtime == "torchtitan" else "fused")
        )
        assert step_flops(layout, 0) - step_flops(whole, 0) == again * once * layout.num_microbatches
        model, hardware = model_and_hardware_flops(layout)
        assert hardware - model == again * once * layout.num_microbatches


def test_bytes_moved_by_way() -> None:
    fused = MemoryPasses(forward=14, backward=10)
    assert loss_passes(fused, "fused", "fused") is fused
    assert loss_passes(fused, "unfused", "fused") == MemoryPasses(forward=38, backward=18)
    assert loss_passes(fused, "linear", "fused") == fused
    assert loss_passes(MemoryPasses(forward=38, backward=18), "unfused", "linear").forward == 38


# TRL 1.13's guide (huggingface/trl, docs/source/long_context_training.md): Qwen3-8B, one sequence of 1,048,576 tokens
# on 8 H100 over cp 8, FSDP 2, gradient checkpointing with offload, chunks of 256 tokens: "Naively, this sequence needs
# 288 GB per GPU. The rest of this guide is how it gets to 56."
MILLION: dict[str, Any] = {
    "model": "qwen3-8b",
    "cluster": "dgx-h100",
    "cluster.nodes": 1,
    "parallel.cp": 8,
    "parallel.zero": 3,
    "model.seq_length": 1_048_576,
    "training.micro_batch_size": 1,
    "training.dtype": "bf16",
    "training.recompute": "full",
    "training.offload_activations": True,
    "training.runtime": "trl",
}


def test_a_million_tokens_take_what_they_took() -> None:
    (memory,) = plan_of(MILLION, training__cross_entropy_chunks=131_072 // 256).estimate.memory
    assert memory.allocated_bytes == pytest.approx(56.2e9, rel=0.1)
    (whole,) = plan_of(MILLION, training__cross_entropy="unfused").estimate.memory
    assert whole.allocated_bytes == pytest.approx(288e9, rel=0.1)
    plan = plan_of(MILLION)
    assert plan.estimate.fits and not plan_of(MILLION, training__cross_entropy="unfused").estimate.fits


# torchtune's README: Llama 3.2 3B on an A100, batch 2 of 4096: 60.0 GiB; compiled, which `other`'s kernels are not,
# 51.0, and so with its loss in chunks 42.9.
TUNE: dict[str, Any] = {
    "model": "llama-3.2-3b",
    "cluster": "dgx-a100",
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 1,
    "model.seq_length": 4096,
    "training.micro_batch_size": 2,
    "training.dtype": "bf16",
    "training.gradient_dtype": "bf16",
    "training.master_weights": False,
    "training.runtime": "other",
}


def test_chunks_save_what_torchtunes_saved() -> None:
    linear = {"training__cross_entropy": "linear", "training__cross_entropy_chunks": 8}
    whole, chunked = (plan_of(TUNE, **more).estimate.memory[0].allocated_bytes / 2**30 for more in ({}, linear))
    assert whole == pytest.approx(60.0, rel=0.1)
    assert whole - chunked == pytest.approx(51.0 - 42.9, rel=0.1)


# Arctic Long Sequence Training (arXiv 2506.13996): Llama 8B, 3.7M tokens on 8 H100 with tiled logits and MLPs,
# checkpoints and optimizer on the host.
ALST: dict[str, Any] = {
    **MILLION,
    "model": "llama-3.1-8b",
    "model.seq_length": 3_700_000,
    "training.runtime": "deepspeed",
    "training.offload_optimizer": True,
    "training.cross_entropy": "linear",
}


def test_tiles_of_an_mlp_save_its_inner_tensors() -> None:
    """An MLP's input alone is saved, its two products run once more; without tiles 3.7M tokens did not fit."""
    plain = plan_of(ALST)
    tiled = plan_of(ALST, **{"training__tiled_mlp": 904})
    assert tiled.estimate.fits and not plain.estimate.fits
    layers, rows, hidden, ffn = 32, 3_700_000 // 8, 4096, 14_336
    again = layers * 2 * rows * 3 * hidden * ffn
    assert step_flops(tiled.layout, 0) - step_flops(plain.layout, 0) == again
    small = {"training__runtime": "deepspeed", "training__dropout": 0.0}
    saved = [
        plan_of(SMALL, **small, **more).estimate.memory[0].activation_bytes for more in ({}, {"training__tiled_mlp": 4})
    ]
    assert saved[0] - saved[1] == 2 * TOKENS * 2 * 4 * WIDTH * 2  # of 2 layers, up and its activation of 4 h in bf16


@pytest.mark.parametrize(
    ("changes", "rule", "words"),
    [
        ({"training.cross_entropy_chunks": 4}, "loss-way", "4 has no effect: cross_entropy fused"),
        (
            {"training.cross_entropy": "linear", "training.cross_entropy_chunks": 5000},
            "loss-parts",
            "5000 chunks of 4096 tokens",
        ),
        ({"training.tiled_mlp": 8192}, "loss-parts", "8192 tiles of 4096 tokens"),
        ({"training.tiled_mlp": 2, "parallel.tp": 2, "cluster.gpus_per_node": 2}, "loss-parts", "2 with tp 2"),
        (
            {"training.runtime": "mpctl", "training.cross_entropy": "te"},
            "job-launched",
            "te is planned, not run by `mpctl launch`",
        ),
        ({"training.runtime": "mpctl", "training.tiled_mlp": 2}, "job-launched", "2 is planned, not run"),
        (
            {"training.runtime": "nanotron", "training.cross_entropy": "te"},
            "runtime-runs",
            "does not run cross_entropy te",
        ),
    ],
)
def test_what_a_loss_refuses(changes: dict[str, Any], rule: str, words: str) -> None:
    checks = [check for check in make_plan(load_job(None, {**SMALL, **changes})).checks if check.rule == rule]
    assert [check for check in checks if words in check.message and check.hint], checks
