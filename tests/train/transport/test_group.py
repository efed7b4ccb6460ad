"""Collectives with a root and all-to-all, over torch and over shared memory."""

from __future__ import annotations

import os
import re
import signal
from functools import reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.records.rundir.collective_log import LOG_BYTES, CollectiveLog, read_collectives
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.ranks import grouped, run_each, run_ranks
from tests.train.layers.oracle import logged
from tests.train.transport.shared_ranks import sharing
from tests.train.transport.test_shared import DTYPES, SHAPES, arrangements, bits, ended, values

WAYS = ("gloo", "memory")
Results = dict[int, dict[str, list[Any]]]


@pytest.fixture(scope="module")
def on_ranks() -> Results:
    calls: dict[str, tuple[Any, ...]] = {}
    for way in WAYS:
        calls |= {f"every root, {way}": (_every_root, way), f"exchanged, {way}": (_exchanged, way)}
        calls[f"in slices, {way}"] = (_in_slices, way)
        for elements in (3, 2000):
            calls[f"among {elements} others, {way}"] = (_among_others, way, elements)
    return {size: run_each(calls, size) for size in (2, 3)}


def _group(way: str, rank: int, size: int, log: list[Collective] | None = None) -> Group:
    return sharing(rank, size, log) if way == "memory" else grouped(rank, size, log)


def _every_root(rank: int, size: int, way: str) -> list:
    """Shapes of no element, of one chunk, and of more chunks than there are slots."""
    log: list[Collective] = []
    group, wrong = _group(way, rank, size, log), []
    for dtype in DTYPES:
        for shape in SHAPES if way == "memory" else SHAPES[:-1]:
            every = [values(r, shape, dtype) for r in range(size)]
            total = reduce(torch.add, every)
            for root in range(size):
                for x in arrangements(every[rank]):
                    sent = group.start_broadcast(x.clone(), root).wait()
                    if bits(sent) != bits(every[root]):
                        wrong.append(f"broadcast {dtype} {shape} from {root}")
                    summed = group.start_reduce(x.clone(), root).wait()
                    if rank == root and not _same(summed, total, way):
                        wrong.append(f"reduce {dtype} {shape} to {root}")
    return [wrong, logged(log)]


def _same(summed: Tensor, total: Tensor, way: str) -> bool:
    """Shared memory sums in rank order; gloo in an order of its own, rounding otherwise."""
    if summed.shape != total.shape:
        return False
    if way == "memory" or not total.is_floating_point():
        return bits(summed) == bits(total)
    return torch.allclose(summed, total, rtol=4 * torch.finfo(total.dtype).eps, atol=16)


@pytest.mark.parametrize("size", [2, 3])
def test_any_rank_sends_to_all_and_gets_the_sum(on_ranks: Results, size: int) -> None:
    logs = {}
    for way in WAYS:
        results = on_ranks[size][f"every root, {way}"]
        assert [wrong for wrong, _ in results] == [[]] * size
        assert all(log == results[0][1] for _, log in results)
        logs[way] = results[0][1]
    of_shape = len(DTYPES) * size * 2
    assert len(logs["gloo"]) == of_shape * 2 * (len(SHAPES) - 1)
    sent = [entry for entry in logs["memory"] if entry[2]]
    assert sent == logs["gloo"]
    assert {entry[:2] for entry in sent} == {("broadcast", "tp"), ("reduce", "tp")}
    first = next(entry for entry in sent if entry[0] == "reduce")
    assert first == ("reduce", "tp", 4 * 8, "float64")


def _among_others(rank: int, size: int, way: str, elements: int) -> list[str]:
    """Two steps of a product are under way between an all-reduce and an all-gather; the ranks wait
    in different orders."""
    group, wrong = _group(way, rank, size), []
    for turn in range(6):
        root, last = turn % size, (turn + 1) % size
        every = [values(10 * turn + r, (elements, 2), torch.int64) for r in range(size)]
        total = reduce(torch.add, every)
        own = [every[rank].clone() for _ in range(5)]
        pending = [
            group.start_broadcast(own[0], root),
            group.start_all_reduce(own[1]),
            group.start_reduce(own[2], last),
            group.start_broadcast(own[3], last),
            group.start_all_gather(own[4], 0),
        ]
        wanted = [every[root], total, total, every[last], torch.cat(every)]
        for which in range(5) if way == "gloo" or rank else (4, 2, 0, 3, 1):
            result = pending[which].wait()
            if (which != 2 or rank == last) and not torch.equal(result, wanted[which]):
                wrong.append(f"turn {turn}, operation {which}")
        if not torch.equal(group.all_reduce(torch.ones(2)), torch.full((2,), float(size))):
            wrong.append(f"turn {turn}, after")
    return wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_several_under_way_among_others(on_ranks: Results, way: str, size: int) -> None:
    for elements in (3, 2000):
        assert on_ranks[size][f"among {elements} others, {way}"] == [[]] * size


def _early(rank: int, size: int, way: str) -> list[float]:
    """Rank 0 starts four, and comes back, before rank 1 starts any."""
    group, go = _group(way, rank, size), torch.zeros(1)
    if rank == 1:
        dist.recv(go, 0)
    pending = [
        start(torch.full((9000,), rank + 1.0), root)
        for root in (0, 1)
        for start in (group.start_broadcast, group.start_reduce)
    ]
    if rank == 0:
        dist.send(go, 1)
    results = [p.wait().unique() for p in pending]
    return [results[at].item() for at in (0, 2, 1 + 2 * rank)]


def test_start_does_not_wait_for_the_other_ranks() -> None:
    early = run_each({way: (_early, way) for way in WAYS}, 2, timeout=60)
    assert early == dict.fromkeys(WAYS, [[1.0, 2.0, 3.0]] * 2)


def _steps(rank: int, size: int) -> list:
    """What the log says while rank 0 waits for a reduction that rank 1 has not started."""
    memory = memoryview(bytearray(LOG_BYTES))
    log = CollectiveLog(memory).group("row", range(size))
    group = Group(rank, size, dist.group.WORLD, "row", log=log)
    group.start_broadcast(torch.ones(3), 0).wait()
    pending = group.start_reduce(torch.ones(4), 1)
    (before,) = read_collectives(bytes(memory)).groups
    pending.wait()
    (after,) = read_collectives(bytes(memory)).groups
    return [[g.name, g.members, g.kind, g.bytes, g.started, g.finished] for g in (before, after)]


def test_the_collective_log_names_a_reduction_and_an_all_to_all() -> None:
    found = run_each({"reduction": (_steps,), "all-to-all": (_logged,)}, 2)
    assert found["all-to-all"] == [["all_to_all", 16, 1]] * 2
    for before, after in found["reduction"]:
        assert before == ["row", "0-1", "reduce", 16, 2, 1]
        assert after == ["row", "0-1", "reduce", 16, 2, 2]


def _leaves(rank: int, size: int, number: int, kind: str) -> None:
    group = sharing(rank, size, timeout=1)
    group.all_reduce(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), number)
    start = group.start_broadcast if kind == "broadcast" else group.start_reduce
    start(torch.ones(9000), 0 if kind == "reduce" else 1).wait()


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"PeerLost: {}: connection closed by peer: rank 1 ended"),
        (signal.SIGSTOP, r"PeerLost: {}: timed out after 1 s of waiting for rank 1 "),
    ],
)
@pytest.mark.quick(2)
def test_a_rank_that_waits_in_vain_says_for_whom(number: int, words: str, kind: str) -> None:
    (code, told), _ = ended(_leaves, 2, number, kind)
    where = rf"tp operation 2 \({kind} of 4096 bytes\)"
    assert code == 1 and re.search(words.format(where), told), told


def _differ(rank: int, size: int) -> str:
    group = sharing(rank, size)
    try:
        (group.start_reduce if rank else group.start_broadcast)(torch.ones(2), 0).wait()
    except RuntimeError as error:
        return str(error)
    return "silently wrong"


def test_a_broadcast_does_not_match_a_reduction() -> None:
    first, second = run_ranks(_differ, 2)
    assert "tp operation 1 (broadcast of 8 bytes): rank 1 came with reduce of 8 bytes" in first
    assert "tp operation 1 (reduce of 8 bytes): rank 0 came with broadcast of 8 bytes" in second


def test_one_rank_has_its_result_at_once() -> None:
    x, log = torch.ones(2), list[Collective]()
    group = Group(record=log.append)
    assert group.start_broadcast(x, 0).wait() is x and group.start_reduce(x, 0).wait() is x
    assert log == []


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_a_group_without_a_way_says_so(kind: str) -> None:
    group = Group(0, 2, name="row")
    start = group.start_broadcast if kind == "broadcast" else group.start_reduce
    with pytest.raises(RuntimeError, match=f"{kind} over row: the group of 2 ranks has no process"):
        start(torch.ones(1), 0)


def _exchanged(rank: int, size: int, way: str) -> list:
    """Rank r has 10 r + k for rank k; along the middle dimension, which one copy brings together;
    sent back, everything is where it was."""
    log: list[Collective] = []
    group = _group(way, rank, size, log)
    own = torch.arange(size) + 10 * rank
    received = group.all_to_all(own, 0)
    middle = own.view(1, size, 1).expand(3, size, 2).clone()
    got = group.all_to_all(middle, 1)
    there_and_back = torch.equal(group.all_to_all(got, 1), middle)
    return [received, got, there_and_back, [[c.kind, c.bytes] for c in log]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_its_block_of_every_rank(on_ranks: Results, way: str, size: int) -> None:
    for rank, found in enumerate(on_ranks[size][f"exchanged, {way}"]):
        received, got, is_back, log = found
        wanted: Tensor = 10 * torch.arange(size) + rank
        assert torch.equal(received, wanted) and is_back
        assert torch.equal(got, wanted.view(1, size, 1).expand(3, size, 2))
        assert log == [["all_to_all", 8 * size], *[["all_to_all", 8 * 6 * size]] * 2]


CUT = [(1, (3, 2, 5)), (2, (2, 3, 4)), (1, (1, 4, 2)), (0, (2, 3))]
"""Dimension and shape of a rank's part of what is gathered or scattered."""


def _whole(number: int, rank: int, size: int) -> Tensor:
    """What a rank scatters of case `number`."""
    dim, shape = CUT[number]
    wide = (*shape[:dim], size * shape[dim], *shape[dim + 1 :])
    return values(30 * number + rank, wide, torch.int64)


def _in_slices(rank: int, size: int, way: str) -> list:
    """Gathers and scatters along each dimension, in one message that a copy orders, then a sample
    at a time; all are under way together."""
    log: list[Collective] = []
    group, made = _group(way, rank, size, log), []
    for least in (1 << 30, 1):
        with patch("mpctl.train.transport.group.SLICE_BYTES", least):
            works = []
            for number, (dim, shape) in enumerate(CUT):
                part = values(30 * number + rank, shape, torch.int64)
                works.append(group.start_all_gather(part, dim))
                works.append(group.start_reduce_scatter(_whole(number, rank, size), dim))
            turned = values(rank, CUT[0][1], torch.int64).mT.contiguous().mT
            results = [group.all_gather(turned, 1), *(work.wait() for work in works)]
        assert all(result.is_contiguous() for result in results)
        made.append([results, [[c.kind, c.bytes] for c in log]])
        log.clear()
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_sample_at_a_time_is_the_message_of_all(on_ranks: Results, way: str, size: int) -> None:
    wanted = []
    for number, (dim, shape) in enumerate(CUT):
        parts = [values(30 * number + r, shape, torch.int64) for r in range(size)]
        summed = reduce(torch.add, [_whole(number, r, size) for r in range(size)])
        wanted.append((torch.cat(parts, dim), summed.chunk(size, dim)))
    for rank, runs in enumerate(on_ranks[size][f"in slices, {way}"]):
        for (again, *found), log in runs:
            assert torch.equal(again, wanted[0][0]) and log == runs[0][1]
            for number, (gathered, scattered) in enumerate(wanted):
                assert torch.equal(found[2 * number], gathered)
                assert torch.equal(found[2 * number + 1], scattered[rank])


def _logged(rank: int, size: int) -> list:
    memory = memoryview(bytearray(LOG_BYTES))
    group = Group(rank, size, dist.group.WORLD, "tp", log=CollectiveLog(memory).group("tp", [0, 1]))
    group.all_to_all(torch.ones(4), 0)
    (progress,) = read_collectives(bytes(memory)).groups
    return [progress.kind, progress.bytes, progress.finished]


def test_one_rank_keeps_its_tensor_and_blocks_must_be_equal() -> None:
    own = torch.ones(3)
    assert Group().all_to_all(own, 0) is own
    with pytest.raises(ValueError, match="3"):
        Group(0, 2).all_to_all(own, 0)
