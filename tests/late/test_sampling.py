"""Sampling over two ranks of a late world, every family: the tokens of one rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from mpctl.train.transport.group import Group
from tests.late.ranks import run_late_ranks
from tests.late.world import LateWorld
from tests.train.runtime.test_sampling import MODELS, drawn


def draw(rank: int, size: int, world: LateWorld) -> dict[str, list[list[int]]]:
    group = Group(rank, size, dist.group.WORLD, "tp")
    return {kind: drawn(kind, group) for kind in MODELS}


@pytest.mark.slow
def test_two_ranks_draw_as_one() -> None:
    alone = {kind: drawn(kind, Group()) for kind in MODELS}
    assert run_late_ranks(draw, 2) == [alone, alone]
