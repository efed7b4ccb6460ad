"""Reports of benches in a terminal: columns and units, what is said of them, what warns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.core.units import seconds_span_text
from mpctl.measure.bench.report import BenchReport
from mpctl.render.bench import print_collective_cases, print_report
from mpctl.run.hosts.machine import Machine
from tests.measure.bench.reports import MADE, kernels_report, made_report, row
from tests.measure.bench.test_collectives import bench_of, planned, rounds
from tests.measure.bench.verify_runs import verification

Captured = pytest.CaptureFixture[str]


def shown(report: Any, capsys: Captured) -> str:
    made: BenchReport = report
    print_report(made, Path("out"))
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", MADE)
def test_every_report_says_where_it_was_measured(name: str, capsys: Captured) -> None:
    words = shown(MADE[name](), capsys)
    assert "medians of 3 rounds" in words
    assert "laptop, A processor, 2 cores, torch 2.11, mpctl 0.9, 2026-01-02" in words
    late = MADE[name]() | {"is_complete": False}
    late["environment"]["load_at_start"] = 7.84
    words = shown(late, capsys)
    assert "! not complete" in words and "the load average is 7.8 on 2 cores" in words


# ---------------------------------------------------------------- collectives


def test_columns_and_units_are_those_of_nccl_tests(capsys: Captured) -> None:
    """8 MB in 4 ms: 4000 us, 2 GB/s, times 1.5; the plan has 12 ms for shared memory."""
    cases = planned(kinds=("all_reduce",))
    made = bench_of(cases, *rounds(0, 4e-3), *rounds(1, 4e-3, wrong=3))
    words = shown(made.report(), capsys)
    assert "size count type redop time least most algbw busbw #wrong" in words
    assert "8000000 2000000 float sum 4000.0 4000.0 4000.0 2.000 3.000 0 " in words
    assert "4000.0 2.000 3.000 3 12000.0" in words and "#wrong planned" in words
    assert "all_reduce over tp, 4 ranks, shared memory (bytes, us, GB/s)" in words
    assert "avg bus bandwidth 3.000 GB/s" in words and "fit:" not in words  # one size tells no line
    assert "1 row with wrong results" in words


def test_what_collectives_are_not_is_said(capsys: Captured) -> None:
    made = bench_of(planned(kinds=("broadcast",)), *rounds(0, 1e-3, wrong=-1))
    made.is_stopped = True
    made.absent.append({"event": "absent", "axis": "tp", "transport": "shared"})
    words = shown(made.report(), capsys)
    assert "rehearsal, not a measurement: 4 ranks share" in words and "not complete" in words
    assert "tp has no shared memory" in words and " N/A " in words
    made.use(Machine(cores=8, gpus=0, memory_bytes=1))
    assert "rehearsal" not in shown(made.report(), capsys)


def test_a_dry_run_lists_the_sizes(capsys: Captured) -> None:
    print_collective_cases(planned(kinds=("all_gather",), transports=("gloo",)))
    words = " ".join(capsys.readouterr().out.split())
    assert "1 case in 3 rounds of 20 calls" in words and "8,000,000 to 8,000,000 bytes" in words


def test_the_summary_has_a_line_for_each_fit(capsys: Captured) -> None:
    """Four ranks: 1 ms and 3 GB/s of the bus; times that do not grow tell no bandwidth."""
    sizes = (4_000, 400_000, 8_000_000)
    seconds = [*(1e-3 + 1.5 * size / 3e9 for size in sizes), 2e-3, 2e-3, 2e-3]
    times = [one for n, t in enumerate(seconds) for one in rounds(n, t)]
    made = bench_of(planned(kinds=("all_reduce",), sizes=sizes), *times)
    words = shown(made.report(), capsys)
    assert "fit: 1.0 ms + bus bytes / 3.000 GB/s, off by 0% on the average" in words
    assert "fit: 2.0 ms whatever the size" in words and "too small to tell a bandwidth" in words
    assert "all_reduce tp 4 gloo 1.0 ms 3.000 2.400" in words


# ---------------------------------------------------------------- kernels


def kernel(name: str, part: str, ranks: int, seconds: float, **changes: Any) -> dict[str, Any]:
    return row(
        f"{name} layers.mlp.up {part} 512x256x1024 fp32 x{ranks}",
        seconds,
        kernel=name,
        site="layers.mlp.up",
        part=part,
        shape={"m": 512, "k": 256, "n": 1024},
        dtype="fp32",
        ranks=ranks,
        cpu_seconds=seconds,
        flops=268e6,
        bytes=3.67e6,
        share_of_peak=0.5,
        flops_per_second=268e6 / seconds,
        bytes_per_second=3.67e6 / seconds,
        predicted_seconds=2e-3,
        **{"is_rehearsal": False, **changes},
    )


def report_of(*rows: dict[str, Any]) -> dict[str, Any]:
    findings = {"device": "a core", "peak_flops": {"fp32": 268e9}, "memory_bandwidth": 1e10, "threads": 1}
    return made_report("kernels", list(rows), job="demo-gpt", findings=findings)


def test_a_line_has_the_times_of_all_ranks_and_the_plan(capsys: Captured) -> None:
    report: Any = report_of(kernel("matmul", "forward", 1, 1e-3), kernel("matmul", "forward", 2, 4e-3))
    print_report(report, Path("out"))
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if "layers.mlp.up" in line]
    assert line.split() == [
        "layers.mlp.up",
        "forward",
        "512x256x1024",
        "1.0",
        "ms",
        "4.0",
        "ms",
        "67.0",
        "50%",
        "2.0",
        "ms",
        "+100%",
    ]
    assert "peaks of a core: fp32 268.0 GFLOP/s, memory 10.0 GB/s" in said
    assert "medians of 3 rounds, 1 thread a rank" in said
    assert all(len(line.rstrip()) <= 100 for line in said.splitlines())


def test_without_figures_of_the_device_cells_are_empty(capsys: Captured) -> None:
    unknown = kernel("copy", "update", 1, 1e-3) | {
        "flops": 0.0,
        "flops_per_second": 0.0,
        "share_of_peak": None,
        "predicted_seconds": None,
        "bytes_per_second": 9e9,
    }
    report = report_of(unknown)
    report["findings"] |= {"device": None, "peak_flops": {}, "memory_bandwidth": None}
    words = shown(report, capsys)
    assert "memory: a = b" in words and "peaks of" not in words and "9.0" in words


def test_rehearsed_kernels_say_so(capsys: Captured) -> None:
    words = shown(report_of(kernel("matmul", "backward_input", 4, 1e-3, is_rehearsal=True)), capsys)
    assert "rehearsal, not a measurement: 4 ranks share 2 cores" in words
    assert "layers.mlp.up dX" in words


def test_kernels_of_a_kind_stand_together(capsys: Captured) -> None:
    words = shown(kernels_report(), capsys)
    heads = ["matrix products", "attention, fused", "memory: a = b + s c", "a full layer"]
    places = [words.index(head) for head in heads]
    assert places == sorted(places) and words.count("matrix products") == 1


# ---------------------------------------------------------------- verify


def test_the_verdict_comes_first(capsys: Captured) -> None:
    report = verification(within=0.05, left_out={"layouts of 8 ranks": "1 GPU"}).report()
    print_report(report, Path("out"))
    out = capsys.readouterr().out
    first, text = out.split("\n")[0], " ".join(out.split())
    assert "9.1% off on average over 1 layout within cores (at most 5% wanted)" in first
    assert first.startswith(("✗", "x"))
    for words in (
        "tp4*",
        "not a measurement: 4 ranks share 2 cores",
        "left out layouts of 8 ranks",
        "tp4 did not run as planned: rank 0, tp all_reduce",
        "not complete",
        "the rank of layout 1 rank had a core for less than 85% of a step",
    ):
        assert words in text


def test_a_report_of_nothing_says_so(capsys: Captured) -> None:
    empty = verification()
    empty.runs.clear()
    assert shown(empty.report(), capsys).startswith("nothing was measured")


def test_a_span_of_time_has_its_unit_once() -> None:
    for low, high, text in (
        (0.525, 0.7793, "525 to 779 ms"),
        (0.93, 1.34, "0.93 to 1.34 s"),
        (0.0123, 0.0456, "12.3 to 45.6 ms"),
        (2e-6, 9e-6, "2.00 to 9.00 µs"),
        (900.0, 90_000.0, "15 to 1500 min"),
    ):
        assert seconds_span_text(low, high) == text
