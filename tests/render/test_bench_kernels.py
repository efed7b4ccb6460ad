"""The table of kernels: a line for each, times by ranks, and what the figures are of."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.bench.kernels import KernelRow, KernelsReport
from mpctl.render.bench_kernels import print_kernels


def row(kernel: str, part: str, ranks: int, seconds: float, **changes: Any) -> KernelRow:
    name = f"{kernel} layers.mlp.up {part} 512x256x1024 fp32 x{ranks}"
    made: Any = {
        "name": name, "kernel": kernel, "site": "layers.mlp.up", "part": part,
        "shape": {"m": 512, "k": 256, "n": 1024}, "dtype": "fp32", "ranks": ranks,
        "seconds": seconds, "seconds_min": seconds, "seconds_max": seconds, "rounds": 3,
        "is_rehearsal": False, "cpu_seconds": seconds, "flops": 268e6, "bytes": 3.67e6,
        "flops_per_second": 268e6 / seconds, "bytes_per_second": 3.67e6 / seconds,
        "share_of_peak": 0.5, "predicted_seconds": 2e-3, **changes,
    }  # fmt: skip
    whole: KernelRow = made
    return whole


def report_of(*rows: KernelRow, **changes: Any) -> KernelsReport:
    made: Any = {
        "schema": "mpctl.bench/2", "bench": "kernels", "job": "demo-gpt", "is_complete": True,
        "environment": {
            "date": "2026-01-02T03:04:05+00:00", "host": "laptop", "machine": "a chip", "cores": 2,
            "gpus": 0, "load_at_start": 0.1, "python": "3.12", "torch": "2.13", "mpctl": "1",
        },
        "command": "mpctl bench kernels", "results": list(rows),
        "findings": {"device": "a core", "peak_flops": {"fp32": 268e9}, "memory_bandwidth": 1e10,
                     "threads": 1}, **changes,
    }  # fmt: skip
    report: KernelsReport = made
    return report


def test_a_line_has_the_times_of_all_ranks_and_the_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_kernels(report_of(row("matmul", "forward", 1, 1e-3), row("matmul", "forward", 2, 4e-3)))
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if "layers.mlp.up" in line]
    assert line.split() == [
        "layers.mlp.up", "forward", "512x256x1024", "1.0", "ms", "4.0", "ms", "67.0", "50%",
        "2.0", "ms", "+100%",
    ]  # fmt: skip
    assert "peaks of a core: fp32 268.0 GFLOP/s, memory 10.0 GB/s" in said
    assert "medians of 3 rounds, 1 thread a rank" in said
    assert all(len(line.rstrip()) <= 100 for line in said.splitlines())


def test_without_figures_of_the_device_cells_are_empty(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = row("copy", "update", 1, 1e-3, flops=0.0, flops_per_second=0.0, share_of_peak=None,
                  predicted_seconds=None, bytes_per_second=9e9)  # fmt: skip
    found: Any = {"device": None, "peak_flops": {}, "memory_bandwidth": None, "threads": 1}
    print_kernels(report_of(unknown, findings=found))
    said = capsys.readouterr().out
    assert "memory: a = b" in said and "peaks of" not in said and "9.0" in said


def test_rehearsals_and_interrupted_benches_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_kernels(report_of(row("matmul", "backward_input", 4, 1e-3, is_rehearsal=True),
                            is_complete=False))  # fmt: skip
    said = " ".join(capsys.readouterr().out.split())
    assert "rehearsal: 4 ranks share 2 cores" in said and "stopped early" in said
    assert "layers.mlp.up dX" in said
