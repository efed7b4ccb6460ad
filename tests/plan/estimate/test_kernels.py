"""Single kernels by hand, and against measured products, attention and all-reduces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from mpctl.plan.estimate.kernels import AttentionWork, Rates, attention_seconds, device_speed, product_seconds
from mpctl.plan.estimate.network import Route
from mpctl.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from mpctl.spec.presets import find_preset

OPERATORS = Path(__file__).parents[2] / "recorded" / "operators.json"
IDEAL = Rates(1e12, 1, 0.0, 0.0, 1.0, 1.0, float("inf"), 0.0)


@cache
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(OPERATORS.read_text("utf-8"))
    return found


def device_of(name: str) -> DeviceSpec:
    return DeviceSpec.model_validate(find_preset("devices", name))


def off(pairs: Iterable[tuple[float, float]]) -> float:
    """Mean absolute error of estimated and measured."""
    return mean(abs(a / b - 1) for a, b in pairs)


def test_a_product_by_hand() -> None:
    assert product_seconds(IDEAL, 1024, 1024, 1024, 2, 2) == pytest.approx(2 * 1024**3 / 1e12)
    shared = IDEAL._replace(processors=3, waves=1.0)  # 32 tiles of 256 x 128: 11 waves, not 10.67
    seconds = 11 * 2 * 256 * 128 * 1024 / (1e12 / 3)
    assert product_seconds(shared, 1024, 1024, 1024, 2, 2) == pytest.approx(seconds)


def test_memory_bounds_a_product_that_computes_little() -> None:
    """A vector times a matrix reads the matrix."""
    rates = IDEAL._replace(bandwidth=1e9)
    moved = 2 * (1024 + 1024 * 1024) + 2 * 1024
    assert product_seconds(rates, 1, 1024, 1024, 2, 2) == pytest.approx(moved / 1e9)


def test_few_tiles_of_a_long_contraction_are_cut_along_it() -> None:
    """One tile of 64 processors would leave 63 idle."""
    rates = IDEAL._replace(processors=64, waves=1.0, bandwidth=1e12)
    whole = 2 * 256 * 128 * 65536 / (1e12 / 64)
    assert product_seconds(rates, 256, 65536, 128, 2, 2) < 0.1 * whole


def test_odd_sides_cost() -> None:
    """14400 / 8 is 1800, a multiple of 8; its heads are of 450, which is none."""
    rates = IDEAL._replace(misaligned=0.8, unaligned=0.4)
    even, odd, odder = (product_seconds(rates, 1024, k, 1024, 2, 2) / k for k in (1792, 1800, 450))
    assert odd == pytest.approx(even / 0.8)
    assert odder == pytest.approx(even / 0.4)


@pytest.mark.parametrize(("name", "bound"), [("a100-pcie", 0.055), ("b200", 0.17)])
def test_measured_products(name: str, bound: float) -> None:
    """SimuMax' tables. What a large product reaches is the device's own; the a100-pcie, at 300 W,
    is not the part whose presets were fitted, so both are compared at one scale."""
    preset = {"a100-pcie": "a100-pcie-80gb"}.get(name, name)
    table, device = measured()["gemm"][name], device_of(preset)
    rates, pairs = device_speed(ClusterSpec(device=device), "bf16").linear, []
    for batch, m, k, n, _, out, part in table["rows"]:
        seconds = product_seconds(rates, m, k, n, 2, 4 if out == "fp32" else 2, batch)
        pairs.append((seconds, batch * 2 * m * k * n / (table["peak_tflops"] * 1e12 * part)))
    scale = sorted(a / b for a, b in pairs)[len(pairs) // 2]
    assert off((a / scale, b) for a, b in pairs) < bound
    assert 0.85 < scale < 1.2


@pytest.mark.parametrize("name", ["a100-pcie", "b200"])
def test_measured_attention(name: str) -> None:
    """Causal; the table divides FLOP of all pairs by the peak. Small ones wait for their launch."""
    device = device_of({"a100-pcie": "a100-pcie-80gb"}.get(name, name))
    speed, pairs = device_speed(ClusterSpec(device=device), "bf16"), []
    for way, batch, seq, heads, _, size, size_v, part in measured()["attention"][name]["rows"]:
        if heads * seq >= 32 * 4096 and size == size_v:
            flops = (2.5 if way == "bwd" else 1.0) * 4 * batch * seq * seq * heads * size
            work = AttentionWork(batch * seq * seq / 2, heads * size, heads, way == "bwd")
            seconds = attention_seconds(speed, work)
            pairs.append((seconds, flops / (device.peak_flops["bf16"] * part)))
    assert len(pairs) > 4
    assert off(pairs) < 0.25


def test_measured_all_reduces() -> None:
    """vTrain's nccl-tests on one node of A100: 20 sizes from 1 MiB to 1 GiB, 2 to 8 ranks."""
    link = LinkSpec.model_validate((find_preset("clusters", "vtrain-a100") or {})["intra_node"])
    pace = 1 / (link.bandwidth * link.efficiency)
    pairs = [
        (Route(int(ranks), 1, pace, link.start, link.latency, 0.0).collective("all_reduce", size), nanoseconds / 1e9)
        for ranks, rows in measured()["nccl_all_reduce"]["a100-nvswitch"].items()
        for size, nanoseconds in rows
    ]
    assert off(pairs) < 0.12
