"""All-to-all of unequal parts: over torch, shared memory and threads, and of a rank alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.records.rundir.collective_log import LOG_BYTES, CollectiveLog, read_collectives
from mpctl.train.rehearsal.fake_backend import DEVICES, fake_tensors, fake_world
from mpctl.train.transport.exchange import Exchange
from mpctl.train.transport.group import Group
from mpctl.train.transport.shared import open_segment
from mpctl.train.transport.timing import Collective, SecondsByAxis
from tests import threads
from tests.ranks import grouped, run_each, run_ranks
from tests.train.transport.shared_ranks import sharing
from tests.train.transport.test_shared import DTYPES, bits, ended, values

WAYS = ("gloo", "memory")
SIZES = (2, 3)
Counts = list[list[int]]  # [source][destination]


def tables(size: int) -> list[Counts]:
    """Rows from every rank to every rank: none at all; all to one; none to oneself; a few; more
    than a slot, and than all slots, of very different numbers."""
    draw = random.Random(size)
    return [
        [[0] * size for _ in range(size)],
        [[7 if to == size - 1 else 0 for to in range(size)] for _ in range(size)],
        [[3 * (to != rank) for to in range(size)] for rank in range(size)],
        [[draw.randrange(5) for _ in range(size)] for _ in range(size)],
        [[draw.choice((0, 1, 40, 900)) for _ in range(size)] for _ in range(size)],
        [[5000 if (rank, to) == (0, 1) else 0 for to in range(size)] for rank in range(size)],
    ]


def sent_and_wanted(table: Counts, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows of a rank, three elements each, and what it should receive."""
    every = [values(r, (sum(row), 3), dtype).split(row) for r, row in enumerate(table)]
    return torch.cat(every[rank]), torch.cat([parts[rank] for parts in every])


def counts(table: Counts, rank: int) -> tuple[list[int], list[int]]:
    return table[rank], [row[rank] for row in table]


def every_table(group: Group) -> list[str]:
    wrong = []
    for number, table in enumerate(tables(group.size)):
        for dtype in DTYPES:
            rows, wanted = sent_and_wanted(table, group.rank, dtype)
            for sent in (rows, rows.t().contiguous().t()):
                got = group.all_to_all_rows(sent, *counts(table, group.rank))
                if got.shape != wanted.shape or bits(got) != bits(wanted):
                    wrong.append(f"table {number} {dtype}")
    return wrong


def _every_table(rank: int, size: int, way: str) -> list[str]:
    return every_table(sharing(rank, size) if way == "memory" else grouped(rank, size))


def _under_way(rank: int, size: int, way: str) -> list[str]:
    """Exchanges of rows before, between and behind other collectives; ranks wait in different
    orders (over gloo only in that of the starts)."""
    group = sharing(rank, size) if way == "memory" else grouped(rank, size)
    wrong = []
    for turn in range(4):
        made = []
        for table in tables(size)[turn % 2 :: 2]:
            rows, wanted = sent_and_wanted(table, rank, torch.float64)
            total = torch.full((1500,), float(size))
            made.append((group.start_all_to_all_rows(rows, *counts(table, rank)), wanted))
            made.append((group.start_all_reduce(torch.ones(1500)), total))
            made.append((group.start_all_gather(torch.ones(2), 0), torch.ones(2 * size)))
        order = list(range(len(made)))
        if way == "memory":
            random.Random(10 * turn + rank).shuffle(order)
        for which in order:
            if not torch.equal(made[which][0].wait(), made[which][1]):
                wrong.append(f"turn {turn}, operation {which}")
    return wrong


@pytest.fixture(scope="module")
def on_ranks() -> dict[int, dict[str, list[Any]]]:
    calls: dict[str, tuple[Any, ...]] = {
        f"{name}, {way}": (function, way)
        for way in WAYS
        for name, function in (("tables", _every_table), ("under way", _under_way))
    }
    return {size: run_each(calls | {"log": (_noted,)}, size) for size in SIZES}


@pytest.mark.parametrize("what", ["tables", "under way"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_its_rows_in_rank_order(
    on_ranks: dict[int, dict[str, list[Any]]], size: int, way: str, what: str
) -> None:
    assert on_ranks[size][f"{what}, {way}"] == [[]] * size


def _on_threads(rank: int, size: int) -> list[str]:
    return every_table(threads.group_of(rank, range(size), "ep"))


def test_threads_exchange_rows_as_ranks_do() -> None:
    assert threads.run_ranks(_on_threads, 3) == [[]] * 3


def _noted(rank: int, size: int) -> list[Any]:
    """What is recorded, logged and timed of one exchange with a planned number of bytes, and of one
    without."""
    memory, log, timer = memoryview(bytearray(LOG_BYTES)), list[Collective](), SecondsByAxis()
    shared = Exchange(open_segment(rank, range(size), None), timeout=20)
    noted = CollectiveLog(memory).group("ep", range(size))
    group = Group(rank, size, None, "ep", log.append, shared, noted, timer)
    table = [[r] * size for r in range(size)]
    rows = torch.ones(rank * size, 3)
    group.all_to_all_rows(rows, *counts(table, rank))
    pending = group.start_all_to_all_rows(rows, *counts(table, rank), recorded=96)
    (before,) = read_collectives(bytes(memory)).groups
    pending.wait()
    (after,) = read_collectives(bytes(memory)).groups
    timed = sorted(timer.seconds)
    return (
        [[c.kind, c.axis, c.bytes, c.dtype] for c in log]
        + [[g.kind, g.bytes, g.started, g.finished] for g in (before, after)]
        + [timed]
    )


@pytest.mark.parametrize("size", SIZES)
def test_the_planned_bytes_are_recorded_and_logged(on_ranks: dict[int, dict[str, list[Any]]], size: int) -> None:
    for rank, noted in enumerate(on_ranks[size]["log"]):
        assert noted == [
            ["all_to_all", "ep", 12 * rank * size, "float32"],
            ["all_to_all", "ep", 96, "float32"],
            ["all_to_all", 96, 2, 1],
            ["all_to_all", 96, 2, 2],
            ["ep"],
        ]


def _disagree(rank: int, size: int, other: str) -> str:
    group, rows = sharing(rank, size), torch.ones(5, 2)
    try:
        if other == "rows":
            group.all_to_all_rows(rows, [2, 3], [2, 2 + rank])
        elif rank == 0:
            group.all_to_all_rows(rows, [2, 3], [2, 3])
        else:
            group.all_to_all(torch.ones(2), 0)
    except RuntimeError as error:
        return str(error)
    return "silently wrong"


def test_ranks_that_disagree_are_told() -> None:
    found = run_each({other: (_disagree, other) for other in ("rows", "kind")}, 2)
    first, second = found["kind"]
    operation = "tp operation 1 (all_to_all of rows of 8 bytes)"
    assert f"{operation}: rank 1 came with all_to_all of 4 bytes" in first
    assert "rank 0 came with all_to_all of rows of 8 bytes" in second
    right, wrong = found["rows"]
    assert right == "silently wrong"  # its counts are right
    assert f"{operation}: rank 0 sends 3 rows, rank 1 expects 2; ranks must exchange" in wrong


def _leaves(rank: int, size: int) -> None:
    group = sharing(rank, size, timeout=1)
    if rank == 1:
        dist.barrier()
        return
    group.all_to_all_rows(torch.ones(9000, 2), [0, 9000], [0, 0])


def test_a_rank_that_waits_in_vain_says_for_whom() -> None:
    (code, told), _ = ended(_leaves, 2)
    operation = r"PeerLost: tp operation 1 (all_to_all of rows of 8 bytes)"
    assert code == 1 and f"{operation}: timed out after 1 s of waiting for rank 1" in told, told


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_rehearsal_receives_rows_without_values(device: torch.device) -> None:
    log: list[Collective] = []
    with fake_world(1, 4), fake_tensors():
        group = Group(1, 4, dist.group.WORLD, "ep", log.append)
        rows = torch.ones(8, 6, dtype=torch.bfloat16, device=device)
        got = group.start_all_to_all_rows(rows, [2] * 4, [2, 0, 1, 4]).wait()
        assert got.shape == (7, 6) and got.device.type == device.type
    assert log == [Collective("all_to_all", "ep", 96, "bfloat16")]


def test_one_rank_keeps_its_rows_and_counts_are_checked() -> None:
    rows, log = torch.ones(3, 2), list[Collective]()
    assert Group(record=log.append).all_to_all_rows(rows, [3], [3]) is rows and log == []
    two = Group(0, 2, dist.group.WORLD, "ep")
    for group, send, receive in (
        (Group(), [3], [2]),
        (two, [1, 1], [0, 0]),
        (two, [3], [3]),
        (two, [4, -1], [1, 1]),
        (two, [1, 2], [1, -1]),
    ):
        with pytest.raises(ValueError, match=r"rows to send|numbers >= 0"):
            group.all_to_all_rows(rows, send, receive)
    with pytest.raises(RuntimeError, match="all_to_all over ep: the group of 2 ranks has no"):
        Group(0, 2, name="ep").all_to_all_rows(rows, [1, 2], [1, 1])


def _over_gloo(rank: int, size: int) -> list[str]:
    """Which types gloo sends; the others travel as bytes of another type.

    In a group of its own: a barrier raises the error of a refused message again if the thread that
    met it has not yet taken it from the group's list, and every rank ends with one of all ranks.
    """
    group, refused = Group(rank, size, dist.new_group(list(range(size)))), []
    for dtype in (torch.bool, torch.int8, torch.int32, torch.float16, torch.int16):
        rows = torch.ones(2, 4, dtype=dtype)
        try:
            assert torch.equal(group.all_to_all_rows(rows, [1, 1], [1, 1]), rows)
        except RuntimeError:
            refused.append(str(dtype))
    fp8 = torch.ones(2, 4).to(torch.float8_e4m3fn)
    sent = group.all_to_all_rows(fp8.view(torch.uint8), [1, 1], [1, 1]).view(fp8.dtype)
    assert torch.equal(sent.float(), fp8.float())
    return refused


def test_types_that_gloo_lacks() -> None:
    assert run_ranks(_over_gloo, 2) == [["torch.int16"]] * 2
