"""Partitions from sinfo, and refusals of jobs that sbatch would let wait for ever."""

from __future__ import annotations

from math import inf

import pytest

from mpctl.core.errors import InputError, Issue
from mpctl.run.clusters.slurm.partitions import (
    NodeRequest,
    chosen_partition,
    read_partitions,
    request_issues,
    time_limit_seconds,
    time_limit_text,
)


@pytest.mark.parametrize(
    ("text", "seconds", "shown"),
    [
        ("90", 5400, "1:30:00"),
        ("5:30", 330, "0:05:30"),
        ("12:00:00", 43200, "12:00:00"),
        ("2-3", 183600, "2-3:00:00"),
        ("2-3:04", 183840, "2-3:04:00"),
        ("2-03:04:05", 183845, "2-3:04:05"),
        ("UNLIMITED", inf, "unlimited"),
        ("infinite", inf, "unlimited"),
    ],
)
def test_each_form_of_sbatch(text: str, seconds: float, shown: str) -> None:
    assert time_limit_seconds(text) == seconds
    assert time_limit_text(seconds) == shown
    assert time_limit_seconds(shown) == seconds


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "-5", "1.5", "12h", "1-"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a time limit"):
        time_limit_seconds(text)


LISTING = """\
batch*|up|1-00:00:00|1-infinite|6|idle|64|257000|gpu:a100:4(S:0-1)|g[01-06]
batch*|up|1-00:00:00|1-infinite|2|down*|64|257000|gpu:a100:4(S:0-1)|g[07-08]
batch*|up|1-00:00:00|1-infinite|1|mixed|128|515000|gpu:a100:4,gpu:v100:4|big
cpu|up|infinite|1-4|8|allocated|32+|1|(null)|c[1-8]
debug|up|30:00|1-2|9|idle~|64|257000|gpu:8|d[1-9]
night|down|infinite|1-infinite|99|idle|64|257000|gpu:8|x[1-99]
"""
PARTITIONS = read_partitions(LISTING)


def issues(**request: object) -> list[Issue]:
    fields = {"nodes": 1, "gpus": 0, "cpus": 1, **request}
    return list(request_issues(PARTITIONS, NodeRequest(**fields)))  # type: ignore[arg-type]


def test_a_listing_is_read() -> None:
    assert [p.name for p in PARTITIONS] == ["batch", "cpu", "debug", "night"]
    batch, cpu, debug, night = PARTITIONS
    assert [(g.nodes, g.gpus, g.is_usable) for g in batch.groups] == [(6, 4, True), (2, 4, False), (1, 8, True)]
    assert (batch.is_default, batch.time_limit, batch.most_nodes) == (True, 86400, inf)
    assert (cpu.groups[0].cpus, cpu.most_nodes, cpu.time_limit) == (32, 4, inf)
    assert (debug.groups[0].gpus, debug.groups[0].is_usable) == (8, True)  # powered up on demand
    assert not night.is_up
    assert chosen_partition(PARTITIONS, None) is batch


@pytest.mark.parametrize("line", ["x", "a|b|c|d|e|f|g|h|i|j", "a|up|1:00|1|two|idle|1|1|(null)|a"])
def test_other_output_is_refused(line: str) -> None:
    with pytest.raises(InputError, match=r"sinfo|time limit"):
        read_partitions(line)


def test_what_fits_is_not_refused() -> None:
    assert issues(nodes=7, gpus=4, cpus=64, seconds=86400.0) == []
    assert issues(nodes=1, gpus=8, cpus=128) == []
    assert issues(nodes=4, cpus=32, partition="cpu", memory_bytes=10**12) == []  # not counted there


@pytest.mark.parametrize(
    ("request_", "words", "way_out"),
    [
        ({"partition": "gpus"}, "no partition 'gpus'; it has batch, cpu, debug", "NAME"),
        (
            {"nodes": 8, "gpus": 4},
            "8 nodes with 4 GPUs, 1 CPU each, but partition 'batch' has 7 such (2 more are down or drained)",
            "fewer nodes",
        ),
        (
            {"nodes": 2, "gpus": 8},
            "has 1 such; it has 8 nodes with 4 GPUs, 64 CPUs, 251.0 GiB; 1 node with 8 GPUs",
            "launch.slurm.partition=debug",
        ),
        ({"nodes": 6, "partition": "cpu"}, "allows a job at most 4", "partition=batch"),
        ({"partition": "night"}, "'night' is not up", "=batch or cpu or debug"),
        ({"partition": "debug", "seconds": 3600.0}, "1:00:00, but partition 'debug' allows 0:30:00", "at most 0:30:00"),
        ({"memory_bytes": 400 * 2**30, "nodes": 2}, "with 1 CPU, 400.0 GiB each", "=cpu"),
    ],
)
def test_what_does_not_fit_is_named_with_a_way_out(request_: dict[str, object], words: str, way_out: str) -> None:
    (issue,) = issues(**request_)
    assert words in issue.message
    assert way_out in issue.hint


def test_all_is_named_at_once() -> None:
    found = issues(nodes=200, gpus=8, partition="night", seconds=1.0)
    assert [issue.rule for issue in found] == ["slurm-partition-down", "slurm-nodes"]
    assert [i.rule for i in issues(nodes=9, partition="debug", seconds=inf)] == ["slurm-nodes", "slurm-time"]
