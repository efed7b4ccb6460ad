"""Rows of kernels by hand; a real bench is in tests/cli/bench."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.measure.bench.kernel_cases import KernelCases, kernel_cases
from mpctl.measure.bench.kernels import KernelBench, KernelRow
from mpctl.measure.bench.report import bench_environment
from mpctl.records.rundir.requests import KernelTiming
from mpctl.run.hosts.machine import Machine
from mpctl.spec.load import load_job

TWO_CORES = Machine(cores=2, gpus=0, memory_bytes=2**26)
DEVICE = {
    "name": "a core",
    "kind": "cpu",
    "memory_bytes": 2**33,
    "memory_bandwidth": 1e10,
    "peak_flops": {"fp32": 1e11},
    "source": "made up",
}
SMALL: dict[str, Any] = {
    "cluster.device": DEVICE,
    "model.family": "gpt",
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 4,
    "model.ffn": 64,
    "model.vocab": 128,
    "model.seq_length": 16,
    "training.micro_batch_size": 2,
    "launch.device": "cpu",
}


def small_cases(*ranks: int) -> KernelCases:
    return kernel_cases(load_job(None, SMALL), TWO_CORES, ranks=ranks, device="cpu")


def kernel_rows(cases: KernelCases, timings: list[KernelTiming]) -> list[KernelRow]:
    return KernelBench(bench_environment(), "mpctl", 2, cases, timings=timings).rows


def timing(case: int, ranks: int, number: int, seconds: float) -> KernelTiming:
    return {
        "event": "kernel",
        "round": number,
        "case": case,
        "ranks": ranks,
        "seconds": seconds,
        "cpu_seconds": seconds / 2,
        "repeats": 1,
    }


def test_a_row_is_the_median_of_its_rounds() -> None:
    """X [32, 32] W [32, 96]: 196,608 FLOP in 2 us are 98.3 GFLOP/s of 100."""
    cases = small_cases(1, 2)
    slow = [timing(0, 1, n, s) for n, s in enumerate((2e-6, 9e-6, 1e-6))]
    rows = kernel_rows(cases, [timing(0, 2, 0, 4e-6), *slow])
    assert [row["name"] for row in rows] == [f"matmul layers.attention.qkv forward 32x32x96 fp32 x{n}" for n in (1, 2)]
    first = rows[0]
    assert (first["seconds"], first["seconds_min"], first["seconds_max"]) == (2e-6, 1e-6, 9e-6)
    assert first["rounds"] == 3 and first["cpu_seconds"] == 1e-6
    assert first["flops_per_second"] == pytest.approx(2 * 32 * 32 * 96 / 2e-6)
    assert first["share_of_peak"] == pytest.approx(0.98304)
    assert rows[1]["share_of_peak"] == pytest.approx(0.98304 / 2)


def test_what_memory_bounds_has_a_share_of_the_bandwidth() -> None:
    cases = small_cases(1)
    number = next(n for n, k in enumerate(cases.kernels) if k.case["kernel"] == "copy")
    size = 8 * cases.kernels[number].case["shape"]["elements"]  # read and written, of 4 bytes
    (row,) = kernel_rows(cases, [timing(number, 1, 0, size / 5e9)])
    assert row["flops"] == 0 and row["bytes_per_second"] == pytest.approx(5e9)
    assert row["share_of_peak"] == pytest.approx(0.5)


def test_more_ranks_than_cores_are_a_rehearsal() -> None:
    cases = small_cases(1, 3)
    rows = kernel_rows(cases, [timing(0, 1, 0, 1.0), timing(0, 3, 0, 1.0)])
    assert [row["is_rehearsal"] for row in rows] == [False, True]
