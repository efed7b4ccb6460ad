"""Every module in 2d, 2.5d and 3d against itself on one rank: outputs and gradients, float64."""

from __future__ import annotations

import pytest

from tests.layers.grid.cases import GROUPS
from tests.layers.grid.grids import GRIDS, ONE, Part, Where, compared, grid_context
from tests.ranks import run_ranks


def _run(rank: int, size: int, where: Where, group: str) -> dict[str, dict[str, Part]]:
    context = grid_context(where, rank)
    return {name: case(context) for name, case in GROUPS[group].items()}


def _is_slow(name: str, group: str) -> bool:
    """Layers of 2.5d and 3d are in the fast tests of models."""
    return name in ("2d-9", "2.5d-4") or (group == "layers" and GRIDS[name][1] > 4)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        pytest.param(name, group, marks=pytest.mark.slow if _is_slow(name, group) else ())
        for name in GRIDS
        for group in GROUPS
    ],
)
def test_a_grid_has_what_one_rank_has(name: str, group: str) -> None:
    where = GRIDS[name]
    ranks = run_ranks(_run, where[1], where, group, timeout=100)
    for name, case in GROUPS[group].items():
        compared([rank[name] for rank in ranks], case(ONE))
