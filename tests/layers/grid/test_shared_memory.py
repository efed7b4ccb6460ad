"""A grid whose groups share memory, with messages that are longer than all slots of a rank.

Each group has an exchange of its own, and a rank serves the one in which it waits. No rank waits
for ever, since all start and wait for the same messages in the same order (transport/shared.py).
"""

from __future__ import annotations

import pytest

from tests.layers.grid.cases import BLOCKS, PRODUCTS, VOCABULARY
from tests.layers.grid.grids import (
    EACH,
    ONE,
    Part,
    Where,
    compared,
    grid_context,
    over_shared_memory,
)
from tests.ranks import run_ranks

SLOT = 256  # bytes, 4 of them a rank; a block of activations has 2,880 and more
CASES = {
    "pair": PRODUCTS["pair"], "layernorm": PRODUCTS["layernorm"], "tied": VOCABULARY["tied"],
    "layer": BLOCKS["llama layer, full, no dropout"],
}  # fmt: skip


def _run(rank: int, size: int, where: Where) -> dict[str, dict[str, Part]]:
    context = over_shared_memory(grid_context(where, rank), slot_bytes=SLOT)
    return {name: case(context) for name, case in CASES.items()}


@pytest.mark.parametrize("where", EACH)
def test_layers_over_shared_memory(where: Where) -> None:
    ranks = run_ranks(_run, where[1], where, timeout=60)
    for name, case in CASES.items():
        compared([rank[name] for rank in ranks], case(ONE))
