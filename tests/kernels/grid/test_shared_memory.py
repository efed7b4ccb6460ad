"""A grid whose groups share memory, with messages that are longer than all slots of a rank.

Each group has an exchange of its own, and a rank serves the one in which it waits. No rank waits
for ever, since all start and wait for the same messages in the same order (transport/shared.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from mpctl.kernels.tensor_parallel import ShardContext
from mpctl.transport.group import Group
from mpctl.transport.segment import open_segment
from mpctl.transport.shared import Exchange
from tests.kernels.grid.cases import BLOCKS, PRODUCTS, VOCABULARY
from tests.kernels.grid.grids import EACH, ONE, Part, Where, compared, grid_context
from tests.ranks import run_ranks

SLOT = 256  # bytes, 4 of them a rank; a block of activations has 2,880 and more
CASES = {
    "pair": PRODUCTS["pair"], "layernorm": PRODUCTS["layernorm"], "tied": VOCABULARY["tied"],
    "layer": BLOCKS["llama layer, full, no dropout"],
}  # fmt: skip


def _sharing(group: Group) -> Group:
    assert group.process_group is not None
    ranks = dist.get_process_group_ranks(group.process_group)
    segment = open_segment(group.rank, ranks, group.process_group, slot_bytes=SLOT)
    return replace(group, process_group=None, shared=Exchange(segment, timeout=20))


def _context(where: Where, rank: int) -> ShardContext:
    context = grid_context(where, rank)
    return replace(context, groups={n: _sharing(group) for n, group in context.groups.items()})


def _run(rank: int, size: int, where: Where) -> dict[str, dict[str, Part]]:
    context = _context(where, rank)
    return {name: case(context) for name, case in CASES.items()}


@pytest.mark.parametrize("where", EACH)
def test_layers_over_shared_memory(where: Where) -> None:
    ranks = run_ranks(_run, where[1], where, timeout=60)
    for name, case in CASES.items():
        compared([rank[name] for rank in ranks], case(ONE))
