"""Figures behind sums of terms: found exactly where they exist, never below 0, least error else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.calibrate.fit import fit_relative

FIGURES = st.floats(1e-3, 1e3)
SIZES = (1.0, 4.0, 16.0, 256.0)


@given(FIGURES, FIGURES)
def test_what_was_put_in_is_found(slope: float, start: float) -> None:
    seconds = [slope * size + start for size in SIZES]
    found = fit_relative([[size, 1.0] for size in SIZES], seconds)
    for size, told in zip(SIZES, seconds, strict=True):
        assert found[0] * size + found[1] == pytest.approx(told, rel=1e-4)


def test_no_figure_is_below_0() -> None:
    """A line through (1, 1) and (2, 3) starts at -1: without a start, 15/13 has the least error."""
    assert fit_relative([[1.0, 1.0], [2.0, 1.0]], [1.0, 3.0]) == pytest.approx([15 / 13, 0.0])


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), st.floats(-0.2, 0.2))
def test_no_other_figures_have_a_smaller_error(noise: list[float], step: float) -> None:
    seconds = [(size + 3) * n for size, n in zip(SIZES, noise, strict=True)]
    terms = [[size, 1.0] for size in SIZES]
    found = fit_relative(terms, seconds)

    def error(slope: float, start: float) -> float:
        pairs = zip(SIZES, seconds, strict=True)
        return sum(((slope * size + start) / t - 1) ** 2 for size, t in pairs)

    least = error(found[0], found[1]) * (1 - 1e-6)
    assert least <= error(found[0] * (1 + step), found[1]) + 1e-9
    assert least <= error(found[0], found[1] * (1 + step)) + 1e-9


def test_a_term_that_no_measurement_has_is_0() -> None:
    assert fit_relative([[2.0, 0.0], [4.0, 0.0]], [1.0, 2.0]) == pytest.approx([0.5, 0.0])
