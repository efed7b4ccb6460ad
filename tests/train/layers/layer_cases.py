"""The settings and layouts at which whole layers are compared with their formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from torch import Tensor

from tests.threads import run_ranks
from tests.train.layers.oracle import close, joined, whole

Kind = tuple[bool, str, bool]  # sequence_parallel, recompute, partition and offload
Layout = tuple[int, int]  # tp, cp
KINDS: tuple[Kind, ...] = (
    (False, "none", False),
    (False, "selective", False),
    (False, "full", False),
    (False, "full", True),
    (True, "none", False),
    (True, "full", False),
)
LAYOUTS = (
    (1, 1),
    (2, 1),
    (1, 2),
    pytest.param((2, 2), marks=pytest.mark.slow),
    pytest.param((4, 1), marks=pytest.mark.slow),
)


def run_cases(
    one: Callable[..., list], every: Callable[..., list], cases: Iterable[Sequence[Any]], layout: Layout
) -> list[list]:
    """For every case what each rank of the layout got. one(rank, layout, *case) computes a case;
    every(rank, ranks, layout) all of them on one rank, as a function that ranks can import."""
    tp, cp = layout
    if tp * cp == 1:
        return [[one(0, (1, 1), *case)] for case in cases]
    return [list(case) for case in zip(*run_ranks(every, tp * cp, [tp, cp]), strict=True)]


def assert_as_formula(
    ranks: Sequence[Sequence[Any]], expected: tuple[list[Tensor], dict[str, Tensor]], layout: Layout, kind: Kind
) -> None:
    """Outputs and gradients of all ranks together are those of the formula.

    expected: tensors in the order in which each rank returned its parts, and gradients by
    parameter, which each rank returned after them.
    """
    values, weights = expected
    for index, value in enumerate(values):
        close(joined([rank[index] for rank in ranks], *layout, kind[0]), value)
    gradients = [rank[len(values)] for rank in ranks]
    assert weights.keys() == gradients[0].keys()
    for name, value in weights.items():
        close(whole([gradient[name] for gradient in gradients]), value)
