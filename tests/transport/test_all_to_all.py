"""All-to-all over gloo and shared memory: what arrives where, what is recorded and logged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.rundir.collective_log import LOG_BYTES, CollectiveLog, read_collectives
from mpctl.transport.group import Group
from mpctl.transport.timing import Collective
from tests.layers.oracle import grouped
from tests.ranks import run_ranks
from tests.transport.shared_ranks import sharing


def _exchanged(rank: int, size: int, way: str) -> list:
    """Rank r has 10 r + k for rank k; along the middle dimension, which one copy brings together;
    sent back, everything is where it was."""
    log: list[Collective] = []
    group = sharing(rank, size, log) if way == "shared" else grouped(rank, size, log)
    own = torch.arange(size) + 10 * rank
    received = group.start_all_to_all(own, 0).wait()
    middle = own.view(1, size, 1).expand(3, size, 2).clone()
    got = group.all_to_all(middle, 1)
    there_and_back = torch.equal(group.all_to_all(got, 1), middle)
    return [received, got, there_and_back, [[c.kind, c.bytes] for c in log]]


@pytest.mark.parametrize("way", ["gloo", "shared"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_its_block_of_every_rank(way: str, size: int) -> None:
    for rank, (received, got, is_back, log) in enumerate(run_ranks(_exchanged, size, way)):
        wanted: Tensor = 10 * torch.arange(size) + rank
        assert torch.equal(received, wanted) and is_back
        assert torch.equal(got, wanted.view(1, size, 1).expand(3, size, 2))
        assert log == [["all_to_all", 8 * size], *[["all_to_all", 8 * 6 * size]] * 2]


def _logged(rank: int, size: int) -> list:
    memory = memoryview(bytearray(LOG_BYTES))
    group = Group(rank, size, dist.group.WORLD, "tp", log=CollectiveLog(memory).group("tp", [0, 1]))
    group.all_to_all(torch.ones(4), 0)
    (progress,) = read_collectives(bytes(memory)).groups
    return [progress.kind, progress.bytes, progress.finished]


def test_the_collective_log_names_it() -> None:
    assert run_ranks(_logged, 2) == [["all_to_all", 16, 1]] * 2


def test_one_rank_keeps_its_tensor_and_blocks_must_be_equal() -> None:
    own = torch.ones(3)
    assert Group().all_to_all(own, 0) is own
    with pytest.raises(ValueError, match="3"):
        Group(0, 2).all_to_all(own, 0)
