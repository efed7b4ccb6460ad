"""Rows hold every conversation once, in few rows, whatever the order of files."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.train.data.packing import best_fit, cut, pack, wrapped


def rows_of(lengths, *, seq_length, packing="best-fit", overflow="refuse", seed=1, counted=lambda d, a, b: b - a):
    packed = pack(np.array(lengths), counted, seq_length=seq_length, packing=packing, overflow=overflow, seed=seed)
    return [row.tolist() for row in packed.rows], packed


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_best_fit(lengths: list[int]) -> None:
    rows = best_fit(lengths, 20)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled) <= 20
    assert sum(one <= 10 for one in filled) <= 1  # two such rows would have become one
    assert all(lengths[i] >= lengths[j] for row in rows for i, j in pairwise(row))


def test_trl_has_the_same_rows() -> None:
    """[5, 2, 3, 1] at 4 (TRL 1.16, `bfd` cuts overflow away, `bfd_split` splits it)."""
    truncated, _ = rows_of([5, 2, 3, 1], seq_length=4, overflow="truncate", counted=lambda d, a, b: 1)
    assert [[piece[2] for piece in row] for row in truncated] == [[4], [3, 1], [2]]
    split, packed = rows_of([5, 2, 3, 1], seq_length=4, overflow="split", counted=lambda d, a, b: 1)
    assert sorted(sorted(piece[2] for piece in row) for row in split) == [[1, 2], [1, 3], [4]]
    assert packed.too_long == 1


@pytest.mark.parametrize(
    ("overflow", "parts"), [("drop", []), ("truncate", [(0, 0, 4)]), ("split", [(0, 0, 4), (0, 4, 2)])]
)
def test_cut(overflow, parts) -> None:
    assert cut([0, 1], [6, 3], 4, overflow) == [*parts, (1, 0, 3)]


def test_wrapped_rows_are_full() -> None:
    rows = wrapped([1, 0, 2], [5, 2, 4], 4)
    assert rows == [[(1, 0, 2), (0, 0, 2)], [(0, 2, 3), (2, 0, 1)], [(2, 1, 3)]]


def test_pieces_without_a_counted_token_are_left_out() -> None:
    rows, packed = rows_of([3, 4, 2], seq_length=4, counted=lambda d, a, b: int(d != 1))
    assert {piece[0] for row in rows for piece in row} == {0, 2} and packed.unused == 1
    rows, packed = rows_of([3, 4, 2], seq_length=4, packing="wrapped", counted=lambda d, a, b: 0)
    assert rows == [] and packed.unused in (4, 5)


def test_the_seed_draws_the_order_of_equals() -> None:
    first, second = (rows_of([4] * 12, seq_length=8, seed=seed)[0] for seed in (1, 2))
    assert first != second and first == rows_of([4] * 12, seq_length=8, seed=1)[0]
