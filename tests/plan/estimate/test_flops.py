"""MFU and HFU: one count for plans, benches and runs, over the peak of the device that ran."""

from __future__ import annotations

import pytest

from mpctl.plan.estimate.flops import (
    Utilization,
    causal_model_flops,
    device_peak,
    find_device,
    model_and_hardware_flops,
    run_utilization,
)
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.planning.plan import make_plan
from mpctl.spec.cluster import DeviceSpec
from mpctl.spec.load import load_job
from mpctl.spec.presets import find_preset, preset_names

GPT = {"model": "gpt2", "training.dtype": "bf16", "cluster.gpus_per_node": 1}


def test_by_hand() -> None:
    used = Utilization(300e12, 400e12, 1000e12)
    assert (used.mfu(0.5), used.hfu(0.5)) == (0.6, 0.8)
    assert Utilization(1.0, 1.0, None).mfu(1.0) is None


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_run_as_fast_as_its_plan_has_the_plans_utilization(recompute: str) -> None:
    settings = {
        **GPT,
        "cluster": "dgx-h100",
        "launch.device": "cuda",
        "cluster.gpus_per_node": 1,
        "training.recompute": recompute,
    }
    plan = make_plan(load_job(None, settings))
    assert plan.layout is not None and plan.estimate is not None
    time = plan.estimate.time
    assert isinstance(time, StepTime)
    used = run_utilization(plan.layout)
    assert used.mfu(time.total) == pytest.approx(time.mfu)
    assert used.hfu(time.total) == pytest.approx(time.hfu)


@pytest.mark.parametrize(
    ("settings", "reported", "peak"),
    [
        ({"launch.device": "cuda"}, "NVIDIA H100 80GB HBM3", 989.4e12),
        ({"launch.device": "cuda"}, "a GPU of tomorrow", None),
        ({"launch.device": "cuda"}, None, None),
        ({"launch.device": "cuda", "cluster.device": "a100-80gb"}, "NVIDIA H200", 312e12),
        ({"launch.device": "cuda", "cluster.device": "mi300x"}, None, 1307.4e12),
        ({"launch.device": "cpu", "cluster.device": "a100-80gb"}, None, None),
        ({"launch.device": "cpu", "cluster.device": "cpu", "launch.threads_per_rank": 2}, None, None),
    ],
)
def test_the_peak_is_that_of_the_device_that_ran(
    settings: dict[str, object], reported: str | None, peak: float | None
) -> None:
    assert device_peak(load_job(None, {**GPT, **settings}), reported) == peak


def test_a_cpus_peak_is_that_of_one_core() -> None:
    cpu = {"launch.device": "cpu", "cluster.device": "cpu", "training.dtype": "fp32"}
    peak = device_peak(load_job(None, {**cpu, "launch.threads_per_rank": 1}))
    assert peak == DeviceSpec.model_validate(find_preset("devices", "cpu")).peak_flops["fp32"]


def test_each_reported_name_is_one_devices() -> None:
    tables = [find_preset("devices", name) or {} for name in preset_names("devices")]
    names = [name for table in tables for name in table.get("reported_as", ())]
    assert len(names) == len(set(names)) >= 20
    found = find_device("NVIDIA H100 80GB HBM3")
    assert found is not None and found.name == "NVIDIA H100-SXM5-80GB"


@pytest.mark.parametrize(
    ("model", "parallel", "full", "causal"),
    [
        ("llama-3-70b", {"parallel.tp": 8}, 481.4e9, 449.2e9),
        ("qwen3-30b-a3b", {"parallel.ep": 8}, 37.58e9, 27.91e9),
        ("bert-large", {}, None, None),
    ],
)
def test_flop_with_and_without_the_half_that_a_causal_mask_hides(
    model: str, parallel: dict[str, object], full: float | None, causal: float | None
) -> None:
    """By hand, of one token: 6 FLOP a parameter in products (69.5e9, and 3.04e9 of the experts that it meets),
    and 12 or 6 times layers x columns of queries x 8,192."""
    settings = {
        "cluster": "dgx-h100",
        "cluster.nodes": 1,
        "cluster.gpus_per_node": 8,
        "model": model,
        "training.global_batch_size": 8,
        **parallel,
    }
    layout = make_plan(load_job(None, settings)).layout
    assert layout is not None
    per_token = layout.job.world_size / layout.tokens_per_step
    counted = [model_and_hardware_flops(layout)[0] * per_token, causal_model_flops(layout) * per_token]
    assert counted == (pytest.approx([full, causal], rel=1e-3) if full else [counted[0]] * 2)
