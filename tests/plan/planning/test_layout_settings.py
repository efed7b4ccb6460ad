"""Layouts are ordered whole: an absent zero_size is below every number, in all comparisons."""

from __future__ import annotations

from mpctl.plan.planning.layout_settings import LayoutSettings


def test_all_comparisons_agree() -> None:
    absent, four = LayoutSettings(), LayoutSettings(zero_size=4)
    assert absent < four
    assert absent <= four
    assert four > absent
    assert four >= absent
    assert not four <= absent
    assert not absent >= four
    assert absent <= absent >= absent
    assert (1, absent) <= (1, four)  # as rows of a search compare
