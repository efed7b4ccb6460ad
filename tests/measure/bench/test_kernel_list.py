"""The kernels of a layout: names, copies, shapes, work and estimates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.measure.bench.kernel_cases import THIS_MACHINE, kernel_cases
from mpctl.measure.bench.kernel_list import (
    CACHE_BYTES,
    MOST_COPIES,
    PlannedKernel,
    case_copies,
    case_sizes,
    layer_seconds,
)
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.kernels import AttentionWork, attention_seconds, device_speed, product_seconds
from mpctl.plan.estimate.time import step_time_model
from mpctl.run.hosts.machine import Machine
from mpctl.spec.load import load_job


def test_a_name_has_the_sizes_and_no_flags() -> None:
    kernel = PlannedKernel(
        "layers.attention",
        {
            "kernel": "attention",
            "part": "forward",
            "dtype": "bf16",
            "copies": 1,
            "shape": {"batch": 2, "heads": 4, "causal": 1, "window": 8},
        },
        flops=1.0,
        bytes=1.0,
        predicted_seconds=None,
    )
    assert kernel.name == "attention layers.attention forward 2x4 bf16" and not kernel.is_layer
    assert case_sizes({"bias": 1, "rows": 3}) == "3"


@given(st.floats(min_value=1, max_value=1e15))
def test_copies_fill_a_cache_unless_they_are_the_most(moved: float) -> None:
    copies = case_copies(moved)
    assert 1 <= copies <= MOST_COPIES
    assert copies * moved >= CACHE_BYTES or copies == MOST_COPIES
    assert copies == 1 or (copies - 1) * moved < CACHE_BYTES


TWO_CORES = Machine(cores=2, gpus=0, memory_bytes=16 * 2**30)
SMALL: dict[str, Any] = {
    "cluster": "this-machine",
    "model.family": "gpt",
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 4,
    "model.ffn": 256,
    "model.vocab": 512,
    "model.seq_length": 32,
    "training.micro_batch_size": 2,
}


def kernels_of(**settings: Any) -> dict[str, PlannedKernel]:
    """By name without the sizes: `matmul layers.mlp.up forward`."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    cases = kernel_cases(load_job(None, {**SMALL, **named}), TWO_CORES, ranks=(1,), device="cpu")
    return {f"{k.case['kernel']} {k.site} {k.case['part']}": k for k in cases.kernels}


def test_products_at_their_local_shapes() -> None:
    whole, split = kernels_of(), kernels_of(parallel__tp=2)
    up, half = (found["matmul layers.mlp.up forward"] for found in (whole, split))
    assert up.case["shape"] == {"m": 64, "k": 64, "n": 256}
    assert half.case["shape"] == {"m": 64, "k": 64, "n": 128}
    assert up.flops == 2 * 64 * 64 * 256 == 2 * half.flops
    assert up.bytes == 4 * (64 * 64 + 64 * 256 + 64 * 256)
    assert split["matmul layers.mlp.down forward"].case["shape"] == {"m": 64, "k": 128, "n": 64}
    assert split["matmul head forward"].case["shape"] == {"m": 64, "k": 64, "n": 256}
    assert up.name == "matmul layers.mlp.up forward 64x64x256 fp32"


def test_an_estimate_is_the_planner_s_own() -> None:
    """Of a product, its gradients and a fused attention: the functions that a plan calls."""
    found, job = kernels_of(), load_job(None, SMALL)
    speed = device_speed(job.cluster, "fp32")
    for part, (m, k, n) in {
        "forward": (64, 64, 256),
        "backward_input": (64, 256, 64),
        "backward_weight": (64, 64, 256),
    }.items():
        expected = product_seconds(speed.other, m, k, n, 4, 4)
        assert found[f"matmul layers.mlp.up {part}"].predicted_seconds == expected
    pairs = 2 * 32 * 32 / 2
    expected = attention_seconds(speed, AttentionWork(pairs, 64, 1, backward=False))
    attention = found["attention layers.attention forward"]
    assert attention.predicted_seconds == pytest.approx(expected)
    assert attention.flops == 4 * pairs * 64
    assert found["triad memory update"].predicted_seconds == pytest.approx(
        found["triad memory update"].bytes / speed.bandwidth
    )


def test_the_parts_of_a_layer_add_up_to_the_planned_layer() -> None:
    """Forward: 4 products, the attention and its heads, 2 branches and the activation."""
    rotary = {"model.position": "rotary", "training.dropout": 0.0}
    found = kernels_of(model__position="rotary")
    time_model = step_time_model(JobLayout.of(load_job(None, {**SMALL, **rotary})))
    names = ("matmul layers", "attention", "heads", "activation")
    parts = sum(
        k.predicted_seconds or 0.0 for name, k in found.items() if name.startswith(names) and name.endswith("forward")
    )
    parts += 2 * (found["branch layers forward"].predicted_seconds or 0.0)
    assert parts == pytest.approx(time_model.layer().forward)


def test_a_layer_takes_its_kernels_and_its_host() -> None:
    """On a CPU one after the other: 0.8 ms a layer forward (presets/runtimes/mpctl.toml)."""
    time_model = step_time_model(JobLayout.of(load_job(None, SMALL)))
    ahead, back = layer_seconds(time_model)
    host = time_model.operators.profile.host.layer
    assert ahead == pytest.approx(time_model.layer().forward + host)
    assert back == pytest.approx(time_model.layer().backward + 2 * host)
    tiny = kernels_of()["layer tiny forward"]
    assert host < (tiny.predicted_seconds or 0.0) < 1.1 * host


def test_equal_kernels_are_listed_once() -> None:
    """An MLP as wide as the hidden states has two products of one shape."""
    names = [name for name in kernels_of(model__ffn=64) if name.startswith("matmul layers")]
    assert "matmul layers.mlp.up forward" not in names  # attention.output has its shape
    assert "matmul layers.attention.output forward" in names


def test_what_is_frozen_is_not_computed_backward() -> None:
    names = kernels_of(training__freeze=["layers.*", "embedding.*"])
    assert "matmul layers.mlp.up forward" in names
    assert not any("backward" in name for name in names if name.startswith("matmul layers"))
    assert "optimizer layers update" not in names


def test_bytes_of_what_memory_bounds() -> None:
    """Hidden states of 64 x 64 in fp32 are 16 KiB: a branch reads or writes them five times."""
    found = kernels_of(model__activation="swiglu", training__dropout=0.1)
    assert found["branch layers forward"].bytes == 7 * 16384
    gate = found["activation layers.mlp forward"]
    assert gate.case["shape"] == {"rows": 64, "columns": 512}
    assert gate.bytes == 4 * 64 * (512 + 256)
    assert found["cross_entropy head forward"].bytes == 4 * 64 * 512
    assert "heads layers.attention forward" not in found  # nothing is moved
    assert found["heads layers.attention backward"].bytes == 3 * 2 * 16384
    turned = kernels_of(model__position="rotary", model__kv_heads=2)
    heads = turned["heads layers.attention forward"]  # of 4 + 2 heads, read and written
    assert heads.bytes == (4 + 2) * 2 * 16384 / 4
    assert found["copy memory update"].bytes * 3 == found["triad memory update"].bytes * 2


def test_operands_are_more_than_a_core_s_cache_holds() -> None:
    """32 MiB in turn, at most 8 sets; a layer, whose tiny one is to find everything, has one."""
    copies = {name: kernel.case["copies"] for name, kernel in kernels_of().items()}
    assert copies["matmul layers.mlp.up forward"] == 8  # of 144 KiB
    assert copies["triad memory update"] == copies["layer tiny forward"] == 1
    wide = kernels_of(model__vocab=65536)["cross_entropy head forward"]
    assert wide.bytes == 2**24 and wide.case["copies"] == 2


@pytest.mark.parametrize("model", ["demo-gpt", "demo-llama", "demo-bert", "demo-t5", "demo-glm"])
def test_every_family_has_kernels_of_its_own_names(model: str) -> None:
    job = load_job(None, {**THIS_MACHINE, "model": model})
    cases = kernel_cases(job, TWO_CORES, ranks=(1, 2), device="cpu")
    names = [kernel.name for kernel in cases.kernels]
    assert len(names) == len(set(names)) > 20
    assert all((kernel.predicted_seconds or 0) > 0 for kernel in cases.kernels)
    assert any(kernel.case["kernel"] == "attention" for kernel in cases.kernels)


def test_products_of_experts_are_timed_expert_by_expert() -> None:
    """By hand, 64 tokens x 2 experts over 4 experts: 32 rows each, filled up to a tile of 64; their
    fused gate and up are 2 x 48 columns. The full layer is timed with a dense MLP."""
    experts = {
        "model.experts": 4,
        "model.experts_per_token": 2,
        "model.expert_ffn": 48,
        "model.activation": "swiglu",
        "training.moe_load": 1.0,
    }
    kernels = kernels_of(**{key.replace(".", "__"): value for key, value in experts.items()})
    up = kernels["grouped_matmul layers.mlp.experts.up forward"]
    assert up.case["shape"] == {"experts": 4, "m": 64, "k": 64, "n": 96}
    assert up.flops == 4 * 2 * 64 * 64 * 96 and up.predicted_seconds
    assert "grouped_matmul layers.mlp.experts.down backward_weight" in kernels
    assert kernels["layer layers forward"].flops == kernels_of(model__activation="swiglu")["layer layers forward"].flops
