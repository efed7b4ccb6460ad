"""Bus bandwidth against bytes counted over the links of a simulated ring; fits, rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.cli.app import run
from mpctl.core.collectives import bus_factor
from mpctl.measure.bench.collective_cases import CollectiveCases, CollectiveOptions, collective_cases
from mpctl.measure.bench.collectives import CollectiveBench, CollectiveRow, fit_collectives, fit_relative
from mpctl.measure.bench.documents import read_report
from mpctl.measure.bench.report import bench_environment
from mpctl.measure.bench.runner import Watch
from mpctl.plan.planning.plan import load_plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.requests import CollectiveRound
from mpctl.run.hosts.machine import Machine

Blocks = list[list[frozenset[int]]]  # [rank][block]: whose contributions are added up in it


class Ring:
    """Ranks that each send to the next one only. sent: bytes over the link that leaves each."""

    def __init__(self, ranks: int, blocks: Blocks) -> None:
        self.ranks, self.blocks, self.sent = ranks, blocks, Counter[int]()

    def pass_on(self, which: Callable[[int], int], add: bool) -> None:
        """Every rank sends block which(rank) on, at once; a block is one byte."""
        moving = [(rank, which(rank)) for rank in range(self.ranks)]
        values = [self.blocks[rank][block] for rank, block in moving]
        for (rank, block), value in zip(moving, values, strict=True):
            self.sent[rank] += 1
            target = self.blocks[(rank + 1) % self.ranks]
            target[block] = target[block] | value if add else value

    def reduce_scatter(self) -> None:
        """Afterwards rank r has block r + 1 of all."""
        for step in range(self.ranks - 1):
            self.pass_on(lambda rank, step=step: (rank - step) % self.ranks, add=True)  # type: ignore[misc]

    def all_gather(self) -> None:
        """From rank r's block r + 1 to all blocks everywhere."""
        for step in range(self.ranks - 1):
            self.pass_on(lambda rank, step=step: (rank + 1 - step) % self.ranks, add=False)  # type: ignore[misc]


def of_every_rank(ranks: int) -> Blocks:
    return [[frozenset([rank])] * ranks for rank in range(ranks)]


def factor(ring: Ring) -> float:
    """Bytes over the busiest link, of a message of one byte a block."""
    return max(ring.sent.values()) / ring.ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_sums_and_gathers_are_what_crosses_a_link_of_a_ring(ranks: int) -> None:
    everyone = frozenset(range(ranks))
    ring = Ring(ranks, of_every_rank(ranks))
    ring.reduce_scatter()
    assert all(ring.blocks[rank][(rank + 1) % ranks] == everyone for rank in range(ranks))
    assert factor(ring) == pytest.approx(bus_factor("reduce_scatter", ranks))
    ring.all_gather()
    assert all(block == everyone for blocks in ring.blocks for block in blocks)
    assert factor(ring) == pytest.approx(bus_factor("all_reduce", ranks))
    gather = Ring(ranks, of_every_rank(ranks))
    gather.all_gather()
    owners = [frozenset([(block - 1) % ranks]) for block in range(ranks)]
    assert all(blocks == owners for blocks in gather.blocks)
    assert factor(gather) == pytest.approx(bus_factor("all_gather", ranks))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_broadcasts_reductions_sends_and_all_to_all_by_their_bytes(ranks: int) -> None:
    """A chain from the root sends each of the message's bytes over every link but the one back to
    it; a reduction is the chain reversed; in an all-to-all a rank keeps its own block of n."""
    links = Counter(dict.fromkeys(range(ranks - 1), ranks))
    for kind in ("broadcast", "reduce"):
        assert bus_factor(kind, ranks) == max(links.values()) / ranks
    leaving = sum(1 for block in range(ranks) if block != 0)
    assert bus_factor("all_to_all", ranks) == pytest.approx(leaving / ranks)
    assert bus_factor("sendrecv", ranks) == bus_factor("send", ranks) == 1.0


def row(size: int, seconds: float, kind: str = "all_gather", ranks: int = 2, **more: Any) -> CollectiveRow:
    algbw = size / seconds
    made: Any = {
        "name": f"{kind} {size}",
        "seconds": seconds,
        "seconds_min": seconds,
        "seconds_max": seconds,
        "rounds": 1,
        "kind": kind,
        "axis": "tp",
        "ranks": ranks,
        "transport": "gloo",
        "dtype": "float32",
        "op": "none",
        "bytes": size,
        "count": size // 4,
        "algbw": algbw,
        "busbw": algbw * bus_factor(kind, ranks),
        "wrong": 0,
        "is_rehearsal": False,
        "predicted_seconds": None,
    } | more
    return made


@given(
    latency=st.floats(0, 1e-3),
    bandwidth=st.floats(1e6, 1e12),
    ranks=st.integers(2, 64),
    kind=st.sampled_from(["all_reduce", "all_gather", "broadcast"]),
)
def test_a_fit_finds_the_line_that_made_the_times(latency: float, bandwidth: float, ranks: int, kind: str) -> None:
    def seconds(size: int) -> float:
        return latency + bus_factor(kind, ranks) * size / bandwidth

    rows = [row(4**n, seconds(4**n), kind, ranks) for n in range(3, 16)]
    (fit,) = fit_collectives(rows)
    assert fit["error"] < 1e-3
    for size in (64, 4**10, 4**15):
        found = fit["latency"] + bus_factor(kind, ranks) * size / fit["bandwidth"]
        assert found == pytest.approx(seconds(size), rel=0.01)
    for size, share in fit["efficiency"]:
        busbw = bus_factor(kind, ranks) * size / seconds(size)
        assert share * fit["bandwidth"] == pytest.approx(busbw)


def test_fits_by_hand() -> None:
    """Two sizes fit any line and show nothing; times that do not grow show a latency only."""
    assert fit_collectives([row(4000, 1e-3), row(4000, 1.1e-3), row(8000, 2e-3)]) == []
    (flat,) = fit_collectives([row(4, 1e-3), row(400, 1e-3), row(4000, 0.9e-3)])
    assert flat["latency"] == pytest.approx(1e-3, rel=0.1)
    assert flat["bandwidth"] is None and flat["efficiency"] == [] and flat["error"] < 0.1
    three = [row(8 * n, 1.0 * n) for n in (1, 2, 3)]
    others = [row(8 * n, 1.0 * n, transport="shared") for n in (1, 2, 3, 4)]
    several = fit_collectives([*three, *others, row(8, 1.0, axis="dp_cp")])
    assert [(f["axis"], f["transport"], len(f["efficiency"])) for f in several] == [
        ("tp", "gloo", 3),
        ("tp", "shared", 4),
    ]


def planned(**options: Any) -> CollectiveCases:
    settings = {
        "parallel.tp": 4,
        "launch.device": "cpu",
        "cluster.intra_node.bandwidth": 1e9,
        "cluster.intra_node.latency": 0.0,
    }
    asked = CollectiveOptions(**{"sizes": (8_000_000,), **options})
    machine = Machine(cores=2, gpus=0, memory_bytes=2**33)
    return collective_cases(load_plan(None, settings), asked, machine)


def rounds(case: int, *seconds: float, wrong: int = 0) -> list[CollectiveRound]:
    return [{"event": "timing", "case": case, "round": n, "seconds": s, "wrong": wrong} for n, s in enumerate(seconds)]


TWO_CORES = Machine(cores=2, gpus=0, memory_bytes=8 * 2**30)


def bench_of(cases: CollectiveCases, *timings: CollectiveRound, asked: int = 1) -> CollectiveBench:
    command = "mpctl bench collectives"
    return CollectiveBench(bench_environment(), command, asked, cases, timings=[*timings])


def test_rows_by_hand() -> None:
    """8 MB in 4 ms are 2 GB/s, of which an all-reduce of 4 ranks has 3 GB/s on the bus. The plan
    has 1.5 x 8 ms for the transport of runs, and nothing for gloo."""
    cases = planned(kinds=("all_reduce",))
    gloo, shared = bench_of(cases, *rounds(0, 4e-3, 3e-3, 5e-3), *rounds(1, 1.0)).rows
    assert gloo["name"] == "all_reduce tp4 float32 8000000 gloo"
    assert (gloo["seconds"], gloo["seconds_min"], gloo["seconds_max"]) == (4e-3, 3e-3, 5e-3)
    assert gloo["algbw"] == pytest.approx(2e9) and gloo["busbw"] == pytest.approx(3e9)
    assert gloo["is_rehearsal"] and gloo["predicted_seconds"] is None
    assert shared["predicted_seconds"] == pytest.approx(12e-3)


def test_what_was_not_timed_has_no_row_and_the_worst_round_counts() -> None:
    cases = planned(kinds=("broadcast", "all_reduce"), transports=("gloo",))
    (only,) = bench_of(cases, *rounds(1, 1.0), *rounds(1, 2.0, wrong=7)).rows
    assert only["kind"] == "all_reduce" and only["wrong"] == 7 and only["rounds"] == 2


TWO_CORES = Machine(cores=2, gpus=0, memory_bytes=8 * 2**30)


def test_a_report_has_rows_and_fits() -> None:
    """One size of a broadcast over two ranks in three rounds; a fit takes several sizes."""
    options = CollectiveOptions((4096,), ("broadcast",), transports=("gloo",))
    plan = load_plan(None, {"parallel.tp": 2, "launch.device": "cpu"})
    cases, times = collective_cases(plan, options, TWO_CORES), rounds(0, 2e-3, 1e-3, 3e-3)
    report = bench_of(cases, *times, asked=3).report()
    (row,) = report["results"]
    assert row["name"] == "broadcast tp2 float32 4096 gloo" and row["seconds"] == 2e-3
    assert report["findings"]["fits"] == []
    assert report["is_complete"] and report["findings"]["layout"] == {"tp": 2, "world": 2}
    assert not bench_of(cases, *times, asked=4).report()["is_complete"]


def test_two_ranks_measure_and_every_round_is_handed_out(tmp_path: Path) -> None:
    options = CollectiveOptions((64,), ("all_reduce", "sendrecv"), iterations=2, warm_up=1)
    plan = load_plan(None, {"parallel.tp": 2, "launch.device": "cpu"})
    cases, seen, told = collective_cases(plan, options, TWO_CORES), [], []
    made = bench_of(cases, asked=2)
    made.measure(
        RunDir(tmp_path / "ranks-r1"),
        Watch(lambda *at: told.append(at)),
        lambda: seen.append([row["rounds"] for row in made.rows]),
    )
    assert seen == [[1, 1, 1], [2, 2, 2]] and made.is_complete
    assert told[-1] == ("time the collectives", 6, 6)
    assert [row["wrong"] for row in made.rows] == [0, 0, 0]
    assert all(0 < row["seconds_min"] <= row["seconds"] for row in made.rows)


@pytest.mark.slow
def test_a_round_ends_where_the_last_way_to_send_is_absent(tmp_path: Path) -> None:
    options = CollectiveOptions((64,), ("broadcast",), transports=("gloo", "shared"), iterations=1, warm_up=0)
    settings = {"parallel.tp": 2, "launch.device": "cpu", "launch.shared_memory": False}
    cases, seen = collective_cases(load_plan(None, settings), options, TWO_CORES), []
    made = bench_of(cases)
    made.measure(RunDir(tmp_path / "ranks-r1"), Watch(lambda *at: None), lambda: seen.append(made.round_timings))
    assert seen == [1] and [row["transport"] for row in made.rows] == ["gloo"]
    report = made.report()
    assert report["is_complete"]
    assert report["findings"]["absent"] == [{"axis": "tp", "transport": "shared"}]


SMALL = ["-b", "4K", "-e", "64K", "-f", "4", "-n", "2", "-w", "1", "--rounds", "2"]


def bench(*more: str) -> list[str]:
    return ["bench", "collectives", *SMALL, "--device", "cpu", *more]


@pytest.mark.slow
def test_a_real_bench_of_four_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    layout = ["--tp", "2", "--dp", "2", "--out", str(out)]
    assert run(bench(*layout, "--json")) == 0
    report: Any = json.loads(capfd.readouterr().out)
    assert report == read_report(out, "OUT") and report["is_complete"]
    rows = report["results"]
    assert len(rows) == 2 * (6 * 2 + 1) * 3
    assert {row["axis"] for row in rows} == {"tp", "dp_cp"}
    assert all(row["wrong"] == 0 and row["rounds"] == 2 for row in rows)
    assert len(report["findings"]["fits"]) == len(rows) / 3
    assert (out / "report.csv").exists() and (out / "ranks-r1" / "answers.jsonl").exists()
    assert run(bench(*layout)) == 2  # the first report stays
    capfd.readouterr()
    assert run(bench(*layout, "--overwrite", "--kinds", "broadcast", "-c", "0")) == 0
    words = capfd.readouterr().out
    assert "busbw" in words and "N/A" in words and "broadcast over dp_cp, 2 ranks" in words


def test_a_dry_run_says_what_would_be_timed(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(bench("--tp", "2", "--dry-run", "--kinds", "all-to-all")) == 0
    words = capfd.readouterr().out
    assert "6 cases in 2 rounds of 2 calls" in words and "all_to_all" in words


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        (["--tp", "1"], {"axis-of-one-rank"}),
        (["--tp", "2", "-b", "many", "-e", "0"], {"bad-size"}),
        (["--tp", "2", "--axes", "pp"], {"axis-of-one-rank"}),
        (["--tp", "2", "--budget", "0"], {"bad-budget"}),
        (["--tp", "2", "--kinds", "gossip", "-d", "quad"], {"unknown-word", "bad-datatype"}),
    ],
)
def test_bad_input_ends_before_anything_is_written(
    words: list[str], rules: set[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(bench("--json", "--out", str(out), *words)) == 2
    issues = json.loads(capfd.readouterr().out)["issues"]
    assert {issue["rule"] for issue in issues} == rules and not out.exists()
    assert all(issue["hint"] for issue in issues)


FIGURES = st.floats(1e-3, 1e3)
UNITS = (1.0, 4.0, 16.0, 256.0)


@given(FIGURES, FIGURES)
def test_what_was_put_in_is_found(slope: float, start: float) -> None:
    seconds = [slope * size + start for size in UNITS]
    found = fit_relative([[size, 1.0] for size in UNITS], seconds)
    for size, told in zip(UNITS, seconds, strict=True):
        assert found[0] * size + found[1] == pytest.approx(told, rel=1e-4)


def test_no_figure_is_below_0() -> None:
    """A line through (1, 1) and (2, 3) starts at -1: without a start, 15/13 has the least error."""
    assert fit_relative([[1.0, 1.0], [2.0, 1.0]], [1.0, 3.0]) == pytest.approx([15 / 13, 0.0])


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), st.floats(-0.2, 0.2))
def test_no_other_figures_have_a_smaller_error(noise: list[float], step: float) -> None:
    seconds = [(size + 3) * n for size, n in zip(UNITS, noise, strict=True)]
    terms = [[size, 1.0] for size in UNITS]
    found = fit_relative(terms, seconds)

    def error(slope: float, start: float) -> float:
        pairs = zip(UNITS, seconds, strict=True)
        return sum(((slope * size + start) / t - 1) ** 2 for size, t in pairs)

    least = error(found[0], found[1]) * (1 - 1e-6)
    assert least <= error(found[0] * (1 + step), found[1]) + 1e-9
    assert least <= error(found[0], found[1] * (1 + step)) + 1e-9


def test_a_term_that_no_measurement_has_is_0() -> None:
    assert fit_relative([[2.0, 0.0], [4.0, 0.0]], [1.0, 2.0]) == pytest.approx([0.5, 0.0])
