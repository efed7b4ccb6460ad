"""Mean error, worst case, rank correlation and coverage by hand."""

from __future__ import annotations

import pytest

from mpctl.bench.verify import HeldFigure, accuracy_of


def compared(*pairs: tuple[float, float], inside: str = "") -> list[HeldFigure]:
    """Comparisons of (predicted, measured); inside: y, n or - (no band) for each."""
    answers = [{"y": True, "n": False}.get(mark) for mark in inside.ljust(len(pairs), "-")]
    return [
        HeldFigure(f"layout {number}", *pair, is_inside=answer)
        for number, (pair, answer) in enumerate(zip(pairs, answers, strict=True))
    ]


def test_errors_are_relative_to_what_was_measured():
    found = accuracy_of(compared((1.1, 1.0), (1.8, 2.0), (4.0, 4.0)))
    assert found["layouts"] == 3
    assert found["mape"] == pytest.approx(0.2 / 3)
    assert found["bias"] == pytest.approx(0.0)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["coverage"] is None


def test_the_worst_is_named_with_its_sign():
    found = accuracy_of(compared((1.2, 1.0), (1.0, 2.0), (3.0, 3.0)))
    assert (found["worst"], found["worst_name"]) == (-0.5, "layout 1")


def test_equal_times_share_a_rank():
    """Predicted ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 x 5)."""
    found = accuracy_of(compared((1, 5), (2, 6), (2, 7), (3, 8)))
    assert found["spearman"] == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


@pytest.mark.parametrize("pairs", [((1, 1), (2, 2)), ((1, 1), (1, 2), (1, 3))])
def test_two_layouts_or_equal_predictions_have_no_order(pairs: tuple[tuple[float, float], ...]):
    assert accuracy_of(compared(*pairs))["spearman"] is None


def test_coverage_counts_layouts_that_have_a_band():
    found = accuracy_of(compared((1, 1), (1, 2), (1, 3), (1, 4), inside="yyn-"))
    assert found["coverage"] == pytest.approx(2 / 3)


def test_nothing_measured_has_no_figures():
    found = accuracy_of([])
    assert found.pop("layouts") == 0 and set(found.values()) == {None}
