"""Tables of collectives: nccl-tests' columns, what fits them, and what must be warned of."""

from __future__ import annotations

import pytest

from mpctl.bench.collectives import MeasuredCollectives, collectives_report
from mpctl.bench.report import bench_environment
from mpctl.hosts.machine import Machine
from mpctl.render.bench_collectives import print_cases, print_collectives
from tests.bench.test_collective_rows import planned, rounds


def shown(made: MeasuredCollectives, capsys: pytest.CaptureFixture[str]) -> str:
    print_collectives(collectives_report(made, bench_environment(), "mpctl bench collectives"))
    return " ".join(capsys.readouterr().out.split())


def test_columns_and_units_are_those_of_nccl_tests(capsys: pytest.CaptureFixture[str]) -> None:
    """8 MB in 4 ms: 4000 us, 2 GB/s, times 1.5; the plan has 12 ms for shared memory."""
    made = MeasuredCollectives(planned(kinds=("all_reduce",)))
    made.rounds |= {0: rounds(0, 4e-3), 1: rounds(1, 4e-3, wrong=3)}
    words = shown(made, capsys)
    assert "size count type redop time least most algbw busbw #wrong" in words
    assert "8000000 2000000 float sum 4000.0 4000.0 4000.0 2.000 3.000 0 " in words
    assert "4000.0 2.000 3.000 3 12000.0" in words and "#wrong planned" in words
    assert "all_reduce over tp, 4 ranks, shared memory (bytes, us, GB/s)" in words
    assert "avg bus bandwidth 3.000 GB/s" in words and "fit:" not in words  # one size tells no line
    assert "1 row with wrong results" in words


def test_what_the_figures_are_not_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    made = MeasuredCollectives(planned(kinds=("broadcast",)), is_complete=False)
    made.rounds[0] = rounds(0, 1e-3, wrong=-1)
    made.absent.append({"event": "absent", "axis": "tp", "transport": "shared"})
    words = shown(made, capsys)
    assert "a rehearsal: 4 ranks share" in words and "fewer rounds than asked for" in words
    assert "tp has no shared memory" in words and " N/A " in words
    made.cases = made.cases.on_hosts(Machine(cores=8, gpus=0, memory_bytes=1))
    assert "rehearsal" not in shown(made, capsys)


def test_a_dry_run_lists_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    print_cases(planned(kinds=("all_gather",), transports=("gloo",)))
    words = " ".join(capsys.readouterr().out.split())
    assert "1 case in 3 rounds of 20 calls" in words and "8,000,000 to 8,000,000 bytes" in words


def test_the_summary_has_a_line_for_each_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks: 1 ms and 3 GB/s of the bus; times that do not grow tell no bandwidth."""
    made = MeasuredCollectives(planned(kinds=("all_reduce",), sizes=(4_000, 400_000, 8_000_000)))
    times = [1e-3 + 1.5 * size / 3e9 for size in (4_000, 400_000, 8_000_000)]
    made.rounds |= {n: rounds(n, t) for n, t in enumerate([*times, 2e-3, 2e-3, 2e-3])}
    words = shown(made, capsys)
    assert "fit: 1000 µs + bus bytes / 3.000 GB/s, off by 0% on the average" in words
    assert "fit: 2.0 ms whatever the size" in words and "too small to tell a bandwidth" in words
    assert "all_reduce tp 4 gloo 1000 µs 3.000 2.400" in words
