"""Rows of experts that travel while a rank computes: no result is read before it is there, and all
is as with messages that are done at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.train.transport.group import Group
from tests import threads
from tests.late.ranks import run_late_ranks
from tests.late.world import LateWorld
from tests.train.layers.test_experts import CONFIGS, LAYOUTS, _full, _result

KINDS = ("plain softmax, shared", "deepseek")


def _late(rank: int, size: int, world: LateWorld) -> list[list[Any]]:
    every, one = Group(rank, size, dist.group.WORLD, "ep"), Group(name="tp")
    assert every.sends_beside
    groups = {"tp": one, "cp": one, "edp": one}
    groups |= dict.fromkeys(("dp", "ep", "etp_ep", "world"), every)
    return [_tensors(_result(rank, size, LAYOUTS["ep 2"], CONFIGS[kind], _full, groups=groups)) for kind in KINDS]


def _tensors(result: dict[str, Any]) -> list[Tensor]:
    named = result["gradients"]
    of_weights = [named[name][0] for name in sorted(named)]
    return [result["y"], result["dx"], result["losses"], result["counts"], *of_weights]


def test_rows_that_arrive_late_change_nothing() -> None:
    late = run_late_ranks(_late, 2)
    layout = LAYOUTS["ep 2"]
    for number, kind in enumerate(KINDS):
        at_once = threads.run_ranks(_result, 2, layout, CONFIGS[kind], _full)
        for rank, result in enumerate(at_once):
            for actual, expected in zip(late[rank][number], _tensors(result), strict=True):
                assert torch.equal(actual, expected)
