"""Ranks that take turns on too few cores: by hand, and as a law of every layout."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.plan.estimate.network import contention_seconds
from mpctl.plan.planning.plan import load_plan

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 4},
    {"dp": 4},
    {"pp": 4},
    {"tp": 2, "pp": 2},
    {"tp": 2, "dp": 2},
    {"cp": 2, "dp": 2},
]


def step(sizes: dict[str, int], cores: int | None) -> Any:
    settings: dict[str, Any] = {f"parallel.{axis}": size for axis, size in sizes.items()}
    settings = {"parallel.tp": 1, **settings, "cluster.gpus_per_node": 4, "cluster.cores": cores}
    settings |= {"training.micro_batch_size": 1, "training.global_batch_size": 8}
    plan = load_plan("demo", {k: v for k, v in settings.items() if v is not None})
    assert plan.estimate is not None
    return plan.estimate.time


def test_by_hand() -> None:
    """Four seconds of work on two cores, compared with a chain of 1.5 s."""
    assert contention_seconds([1.0] * 4, 2.0, 1.5) == 0.5
    assert contention_seconds([1.0] * 4, 1.0, 1.5) == 0.0


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.floats(1, 16), st.floats(0.1, 100))
def test_a_step_ends_after_its_chain_and_after_all_work(works: list[float], sharing: float, chain: float) -> None:
    ends = chain + contention_seconds(works, sharing, chain)
    assert ends >= chain
    if sharing > 1:
        assert ends == pytest.approx(max(chain, sharing * sum(works) / len(works)))


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_fewer_cores_are_never_faster(sizes: dict[str, int]) -> None:
    alone, half, one = (step(sizes, cores) for cores in (4, 2, 1))
    assert alone.contention == 0 < one.contention
    assert alone.total <= half.total <= one.total
    assert one.parts() | {"contention": 0} == alone.parts()
    assert one.mfu < alone.mfu
