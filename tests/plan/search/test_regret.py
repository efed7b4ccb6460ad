"""The regret of a search's first row over published sweeps (tests/search_sweeps.py)."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from tests.search_sweeps import SweepRun, find_regrets, kept_back

MEAN, MEDIAN, OTHERS = 0.055, 0.001, 0.04
"""Most regret: mean of nanotron's sweeps, its median, mean of the others."""


def run(measured: float, estimated: float, complexity: float, share: float = 0.5) -> SweepRun:
    return SweepRun(measured, estimated, complexity, share, share <= 0.95)


def test_regret_is_by_hand() -> None:
    """The second is estimated fastest and 10 % slower, the plainest of a tie 20 %; what does not fit counts for
    neither, and a sweep of one layout not at all."""
    sweep = [run(1.0, 1.04, 3), run(1.1, 1.0, 2), run(1.2, 1.05, 1), run(0.5, 0.5, 0, share=1.1)]
    regrets = find_regrets([sweep, [run(1.0, 1.0, 1)]], 0.1)
    assert regrets.first == pytest.approx([0.1]) and regrets.suggested == pytest.approx([0.2])
    assert find_regrets([sweep], 0.02).suggested == pytest.approx([0.1])


def test_a_full_device_gives_way_to_a_layout_about_as_fast() -> None:
    sweep = [run(4.0, 1.0, 1, share=0.95), run(1.0, 1.05, 1)]
    assert find_regrets([sweep], 0.04).first == [0.0]


@pytest.mark.slow  # 500 estimates and peaks
def test_the_first_row_of_published_sweeps() -> None:
    for name, kind, regrets in kept_back():
        assert len(regrets.first) >= 17
        if name == "nanotron":
            assert fmean(regrets.first) <= MEAN and median(regrets.first) <= MEDIAN, kind
        else:
            assert fmean(regrets.first) <= OTHERS, kind
