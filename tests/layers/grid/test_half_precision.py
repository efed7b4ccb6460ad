"""Layers of a grid in bfloat16: as near to float64 as those of one rank are.

A grid rounds the sum of a product to 16 bit after each of its q steps, one rank does once; norms
and losses compute in float32 on both.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mpctl.layers.shard_context import ShardContext
from tests.layers.grid.cases import Case, layer, norm, words
from tests.layers.grid.grids import EACH, ONE, Part, Where, grid_context
from tests.layers.oracle import whole
from tests.ranks import run_ranks

CASES: dict[str, Case] = {
    "gpt": lambda context: layer(context, family="gpt"),
    "llama": lambda context: layer(context, family="llama", recompute="full"),
    "layernorm": lambda context: norm(context, kind="layernorm", offset=0.0),
    "rmsnorm": lambda context: norm(context, kind="rmsnorm", offset=0.0),
    "untied": lambda context: words(context, vocab=31, tied=False),
}


def _run(rank: int, size: int, where: Where) -> dict[str, dict[str, Part]]:
    context = replace(grid_context(where, rank), dtype=torch.bfloat16)
    return {name: case(context) for name, case in CASES.items()}


def _errors(ranks: list[dict[str, Part]], exact: dict[str, Part]) -> dict[str, float]:
    """Of each result, root mean square relative to its size."""
    errors = {}
    for name, (expected, _) in exact.items():
        together = whole([rank[name] for rank in ranks]).double()
        errors[name] = ((together - expected).norm() / expected.norm()).item()
    return errors


@pytest.mark.parametrize("where", EACH)
def test_sums_of_16_bit_are_as_good_as_those_of_one_rank(where: Where) -> None:
    ranks = run_ranks(_run, where[1], where, timeout=100)
    for name, case in CASES.items():
        exact, alone = case(ONE), case(ShardContext(dtype=torch.bfloat16))
        assert all(part.dtype == alone[key][0].dtype for key, (part, _) in ranks[0][name].items())
        one, grid = _errors([alone], exact), _errors([rank[name] for rank in ranks], exact)
        for key, error in grid.items():
            assert error < 2 * one[key] + 1e-3, f"{name} {key}: {error:.2e}, {one[key]:.2e} of one"
            assert error < 0.02
