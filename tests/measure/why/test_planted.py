"""Planted causes are among the first two suspects; healthy logs have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import pytest

from mpctl.measure.why.observed import Observed
from mpctl.measure.why.series import Point
from tests.measure.why.planted import DENSE, EXPERTS, SHARDED, Times, find, noisy, observe, plan_of, suspects_of

FORMS = ("megatron", "torchtitan", "nanotron", "deepspeed")
CASES = [(seed, noise) for seed in (1, 2) for noise in (0.005, 0.03)]
RETRIES = "[rank0]:[titan] 2026-11-01 10:00:58,838 - root - WARNING - 3 CUDA memory allocation retries."
FLUSHES = "[WARNING] [stage3.py:2069:step] 2 pytorch allocator cache flushes since last step."


def each(change: Callable[[int, float], float], times: Times) -> Times:
    return [change(n, seconds) for n, seconds in enumerate(times)]


def causes(
    times: Times, settings: dict[str, object], path: Path, form: str = "megatron", **more: dict[int, str]
) -> list[str]:
    return [suspect.cause for suspect in find(times, settings, path, form, **more)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_healthy_logs_have_no_suspect(form: str, noise: float, seed: int, tmp_path: Path) -> None:
    times = noisy(1.03 * plan_of(DENSE).time.total, seed, noise)
    times[80] *= 3  # an occasional save
    times[160] *= 3
    assert causes(times, DENSE, tmp_path, form) == []
    saves = dict.fromkeys(range(49, 200, 50), "  saving checkpoint at iteration to /data")
    times = each(lambda n, s: s * (2 if n in range(50, 200, 50) else 1), noisy(plan_of(DENSE).time.total, seed, noise))
    assert causes(times, DENSE, tmp_path, form, lines=saves) == []


SHAPES: dict[str, tuple[str, Callable[[Random, int, float], float]]] = {
    "level": ("slow-gpu", lambda _, n, s: s * (1.07 if n >= 90 else 1)),
    "episode": ("slow-gpu", lambda _, n, s: s * (1.2 if 70 <= n < 120 else 1)),
    "growth": ("host-growth", lambda _, n, s: s * (1 + 0.3 * n / 200)),
    "heat": ("heat", lambda _, n, s: s * (1 + 0.07 * n / 200)),
    "loader": ("loader", lambda _, n, s: s * (1.5 if n % 16 == 5 else 1)),
    "collections": ("gc", lambda _, n, s: s * (1.4 if n % 20 == 5 else 1)),
    "saves": ("checkpoint", lambda _, n, s: s * (6 if n % 40 == 39 else 1)),
    "random": ("gc", lambda r, _, s: s * (1.6 if r.random() < 0.08 else 1)),
    "lengths": ("sequence-spread", lambda r, _, s: s * (1 + abs(r.gauss(0, 0.2)))),
    "first steps": ("first-steps", lambda _, n, s: s * (3 if n < 14 else 1)),
}


@pytest.mark.parametrize(("seed", "noise"), CASES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SHAPES)
def test_forms_in_time_point_to_their_cause(name: str, form: str, seed: int, noise: float, tmp_path: Path) -> None:
    cause, change = SHAPES[name]
    random = Random(seed)
    times = each(lambda n, s: change(random, n, s), noisy(plan_of(DENSE).time.total, seed, noise))
    assert cause in causes(times, DENSE, tmp_path, form)[:2]


def test_a_rise_with_experts_may_be_their_balance(tmp_path: Path) -> None:
    times = each(lambda n, s: s * (1 + 0.2 * n / 200), noisy(plan_of(EXPERTS).time.total, 1, 0.01))
    assert causes(times, EXPERTS, tmp_path)[:2] == ["moe-imbalance", "host-growth"]


FLAT: dict[str, tuple[dict[str, object], str, Callable[[], float]]] = {
    "clock": (DENSE, "device-clock", lambda: plan_of(DENSE).slower_kernels(1.2)),
    "power": (DENSE, "device-clock", lambda: plan_of(DENSE).slower_kernels(1.35)),
    "network": (SHARDED, "network", lambda: plan_of(SHARDED).slower_link("inter_node")(20)),
    "experts' network": (EXPERTS, "network", lambda: plan_of(EXPERTS).slower_link("inter_node")(12)),
    "split": (DENSE, "pipeline-split", lambda: plan_of(DENSE).slower_stage(1.3)),
    "fp32": (DENSE, "fp32", lambda: _with("training.dtype", "tf32")),
    "attention": (DENSE, "attention", lambda: _with("model.attention", "unfused")),
}


def _with(name: str, value: object) -> float:
    other = plan_of(DENSE).with_settings({name: value})
    assert other is not None
    return other.time.total


@pytest.mark.parametrize("noise", [0.005, 0.03])
@pytest.mark.parametrize("name", FLAT)
def test_a_flat_slow_run_has_its_cause_among_the_first(name: str, noise: float, tmp_path: Path) -> None:
    settings, cause, seconds = FLAT[name]
    found = find(noisy(seconds(), 1, noise), settings, tmp_path)
    assert cause in [suspect.cause for suspect in found[:2]]
    assert {suspect.signature for suspect in found} == {"flat"}
    assert found[0].seconds


def test_memory_tells_recomputation_from_a_slow_device(tmp_path: Path) -> None:
    whole = plan_of(DENSE).with_settings({"training.recompute": "full"})
    assert whole is not None
    times = noisy(whole.time.total, 1, 0.01)
    for plan, first in ((whole, "recompute"), (plan_of(DENSE), "device-clock")):
        size = plan.estimate.fullest_stage.allocated_bytes / 2**20
        line = (
            f"[Rank 0] (after 2 iterations) memory (MB) | allocated: 9000.0 | max allocated: {size:.1f} | reserved: 1.0"
        )
        found = causes(times, DENSE, tmp_path, lines={1: line})
        assert found[0] == first
        assert ("recompute" in found) == (first == "recompute")


@pytest.mark.parametrize(("line", "cause"), [(RETRIES, "allocator-retries"), (FLUSHES, "allocator-retries")])
def test_what_the_log_says_comes_first(line: str, cause: str, tmp_path: Path) -> None:
    times = noisy(1.4 * plan_of(DENSE).time.total, 1, 0.01)
    found = find(times, DENSE, tmp_path, lines=dict.fromkeys(range(20, 200, 10), line))
    assert found[0].cause == cause
    assert "pytorch" in found[0].evidence or "CUDA" in found[0].evidence


def test_sockets_are_named_between_nodes(tmp_path: Path) -> None:
    line = "host1:123:456 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>"
    times = noisy(1.4 * plan_of(DENSE).time.total, 1, 0.01)
    assert causes(times, DENSE, tmp_path, lines={0: line})[0] == "sockets"


def test_a_rank_that_a_detector_names_is_named(tmp_path: Path) -> None:
    line = "0: INFO:megatron.core.utils:[2024-03-14] | MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: {} | MnPwr/Rnk: 601796W/8"
    times = noisy(plan_of(DENSE).time.total, 1, 0.01)
    (found,) = find(times, DENSE, tmp_path, lines={100: line.format("4468.20ms/0")})
    assert found.cause == "straggler" and found.seconds == pytest.approx(1.015, abs=0.01)
    assert "rank 0 takes 4468 ms" in found.evidence
    assert find(times, DENSE, tmp_path, lines={100: line.format("3468.20ms/0")}) == []


def test_a_sparse_peak_is_a_trap_of_counting(tmp_path: Path) -> None:
    seconds = plan_of(DENSE).time.total
    observed = observe(noisy(seconds, 1, 0.01), DENSE, tmp_path, "torchtitan")
    for peak, counted in ((1979.0, True), (312.0, True), (989.5, False)):
        found = suspects_of(replace(observed, tflops=420.0, mfu=420 / peak))
        assert [suspect.cause for suspect in found] == ["counting"] * counted


BLOOM = {
    "cluster": "jean-zay",
    "cluster.nodes": 48,
    "cluster.gpus_per_node": 8,
    "model": {
        "layers": 70,
        "hidden": 14336,
        "ffn": 57344,
        "heads": 112,
        "vocab": 250880,
        "seq_length": 2048,
        "attention": "unfused",
    },
    "parallel.tp": 4,
    "parallel.pp": 12,
    "parallel.zero": 1,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 2048,
    "training.recompute": "full",
    "training.runtime": "megatron-deepspeed",
}


@pytest.mark.parametrize("lines_before", [20, 80])
def test_the_slow_gpu_of_bloom_is_found(lines_before: int) -> None:
    """BigScience's chronicle of 2022-04-28: five lines of its log, the levels on both sides repeated."""
    random = Random(7)
    printed = [105.16, 105.17, 106.25, 110.17, 111.14]
    before = [105.2 * (1 + random.gauss(0, 0.003)) for _ in range(lines_before)]
    after = [111.1 * (1 + random.gauss(0, 0.003)) for _ in range(75)]
    seconds = [*before, *printed, *after]
    first = 42780 - lines_before
    points = tuple(Point(first + n, s) for n, s in enumerate(seconds))
    found = suspects_of(Observed("bloom", plan_of(BLOOM).layout, points, median(seconds)))
    assert found[0].cause == "slow-gpu"
    assert "5.7 % longer from step 4278" in found[0].evidence or "5.6 % longer" in found[0].evidence
    assert found[0].signature == "level-shift"
