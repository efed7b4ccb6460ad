"""Exchange through shared memory: the bits of gloo, several operations under way."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.transport.group import Group
from mpctl.transport.timing import Collective
from tests.layers.oracle import grouped, logged
from tests.ranks import run_ranks
from tests.transport.shared_ranks import sharing

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


SHAPES = ((1, 4), (3, 4), (5, 1, 12), (173, 12), (751, 12), (0, 4))


KINDS = ("all_reduce", "max", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, shape, generator=draw)
    return (torch.randn(*shape, generator=draw, dtype=torch.float64) * 1000).to(dtype)


def collective(kind: str, group: Group, x: Tensor) -> Tensor:
    """Along the last dimension; broadcast from the last rank."""
    return {
        "all_reduce": lambda: group.all_reduce(x),
        "max": lambda: group.all_reduce(x, "max"),
        "all_gather": lambda: group.all_gather(x, -1),
        "reduce_scatter": lambda: group.reduce_scatter(x, -1),
        "all_to_all": lambda: group.all_to_all(x, -1),
        "broadcast": lambda: group.broadcast(x, group.size - 1),
    }[kind]()


def arrangements(x: Tensor) -> list[Tensor]:
    """x whole, and the same numbers lying apart in memory."""
    return [x.clone(), x.movedim(0, -1).contiguous().movedim(-1, 0)]


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _beside_gloo(rank: int, size: int) -> list:
    logs: tuple[list[Collective], list[Collective]] = ([], [])
    ours, gloo, wrong = sharing(rank, size, logs[0]), grouped(rank, size, logs[1]), []
    for kind in KINDS:
        for dtype in DTYPES:
            for shape in SHAPES[:-1]:
                x = values(rank, shape, dtype)
                pairs = zip(arrangements(x), arrangements(x), strict=True)
                for left, right in pairs:
                    made, wanted = collective(kind, ours, left), collective(kind, gloo, right)
                    in_place = made.data_ptr() == left.data_ptr()
                    same = made.shape == wanted.shape and bits(made) == bits(wanted)
                    if not same or in_place != (wanted.data_ptr() == right.data_ptr()):
                        wrong.append(f"{kind} {dtype} {shape}")
    return [wrong, logged(logs[0]) == logged(logs[1]), len(logs[0])]


def test_two_ranks_get_the_bits_of_gloo_and_record_the_same() -> None:
    for wrong, same_log, count in run_ranks(_beside_gloo, 2):
        assert wrong == [] and same_log
        assert count == len(KINDS) * len(DTYPES) * (len(SHAPES) - 1) * 2


def _several(rank: int, size: int) -> list[str]:
    group, wrong = sharing(rank, size), []
    for kind in KINDS:
        for dtype in DTYPES:
            for shape in SHAPES:
                every = [values(r, (*shape[:-1], shape[-1] * 3), dtype) for r in range(size)]
                total = reduce(torch.add, every)
                own = slice(*(shape[-1] * 3 // size * r for r in (rank, rank + 1)))
                wanted = {
                    "all_reduce": total,
                    "max": reduce(torch.maximum, every),
                    "all_gather": torch.cat(every, -1),
                    "reduce_scatter": total[..., own],
                    "all_to_all": torch.cat([x[..., own] for x in every], -1),
                    "broadcast": every[-1],
                }[kind]
                if bits(collective(kind, group, every[rank].clone())) != bits(wanted):
                    wrong.append(f"{kind} {dtype} {shape}")
    return wrong


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_gets_the_sum_in_rank_order(size: int) -> None:
    """Zero-size messages among them."""
    assert run_ranks(_several, size) == [[]] * size


def _in_place(rank: int, size: int, way: str) -> list[bool]:
    """More than slots hold; the third rank's own part comes last in the sum."""
    group = {"shared": sharing, "gloo": grouped}[way](rank, size)
    whole = values(rank, (size * 4000,), torch.float32)
    apart = group.reduce_scatter(whole.clone(), 0)
    part = group.start_reduce_scatter_in_place(whole).wait()
    own = whole.view(size, -1)[rank]
    return [part.data_ptr() == own.data_ptr(), torch.equal(own, apart)]


@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_a_sum_scattered_in_place_has_the_same_bits(way: str) -> None:
    assert run_ranks(_in_place, 3, way) == [[True, True]] * 3


def _many(rank: int, size: int) -> int:
    group, x = sharing(rank, size), torch.zeros(3, dtype=torch.int64)
    for turn in range(10_000):
        x[0], x[1], x[2] = turn, rank, turn * rank
        got = group.all_reduce(x.clone()) if turn % 3 else group.all_gather(x, 0)
        wanted = [2 * turn, 1, turn] if turn % 3 else [turn, 0, 0, turn, 1, turn]
        if got.tolist() != wanted:
            return turn
    return -1


def test_ten_thousand_operations() -> None:
    assert run_ranks(_many, 2) == [-1, -1]


def _out_of_order(rank: int, size: int, order: list[int], elements: int) -> list[str]:
    """Rank 1 waits in the opposite order; between the two rounds nothing is left over."""
    group, wrong, t = sharing(rank, size), [], size
    for turn in range(3):
        every = [values(10 * turn + r, (elements, t), torch.float64) for r in range(size)]
        inputs = [every[rank].clone() for _ in range(5)]
        pending = [
            group.start_all_gather(inputs[0], 0),
            group.start_all_reduce(inputs[1]),
            group.start_reduce_scatter(inputs[2], 1),
            group.start_all_reduce(inputs[3], "max"),
            group.start_all_to_all(inputs[4], 1),
        ]
        total = reduce(torch.add, every)
        wanted = [
            torch.cat(every), total, total[:, rank : rank + 1], reduce(torch.maximum, every),
            torch.stack([x[:, rank] for x in every], 1),
        ]  # fmt: skip
        for which in order if rank == 0 else order[::-1]:
            if not torch.equal(pending[which].wait(), wanted[which]):
                wrong.append(f"turn {turn}, operation {which}")
        if not torch.equal(group.all_reduce(torch.ones(2)), torch.full((2,), float(t))):
            wrong.append(f"turn {turn}, after")
    return wrong


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 3, 4, 0, 2]])
@pytest.mark.parametrize("elements", [2, 2000])
def test_waits_in_any_order(order: list[int], elements: int) -> None:
    assert run_ranks(_out_of_order, 2, order, elements, timeout=30) == [[], []]


def _late(rank: int, size: int) -> Tensor:
    """Rank 1 joins once rank 0 has come back from all its starts: one that waits would hang."""
    group, go, x = sharing(rank, size), torch.zeros(1), torch.full((2, 4), rank + 1.0)
    if rank == 1:
        dist.recv(go, 0)
    pending = [
        group.start_all_reduce(x.clone()),
        group.start_all_gather(x, 1),
        group.start_reduce_scatter(x, 1),
        *(group.start_all_reduce(torch.ones(9000)) for _ in range(2)),  # more than slots hold
    ]
    if rank == 0:
        dist.send(go, 1)
    assert [p.wait().unique().tolist() for p in pending[3:]] == [[2.0], [2.0]]
    return torch.cat([p.wait().flatten() for p in pending[:3]])


def test_start_does_not_wait_for_the_other_ranks() -> None:
    ones = torch.ones(8)
    gathered = torch.tensor([1.0] * 4 + [2.0] * 4).repeat(2)
    for result in run_ranks(_late, 2, timeout=30):
        assert torch.equal(result, torch.cat([3 * ones, gathered, 3 * ones[:4]]))


def _with_grad(rank: int, size: int) -> bool:
    """A leaf summed outside no_grad, as gloo takes it; the graph does not reach the slots."""
    group, x = sharing(rank, size), torch.ones(3, requires_grad=True)
    group.all_reduce(x)
    y = group.all_reduce(x * 2)
    return x.is_leaf and not group.shared.segment.data.requires_grad and y.tolist() == [8.0] * 3


def test_autograd_does_not_see_the_memory() -> None:
    assert run_ranks(_with_grad, 2) == [True, True]
