"""Ranges of steps and batches as people write them."""

from __future__ import annotations

import pytest

from mpctl.spec.base import is_within, rising_ranges


def test_numbers_and_ranges_rise() -> None:
    assert rising_ranges(" 3,5-7 , 9-9") == [(3, 3), (5, 7), (9, 9)]
    assert [n for n in range(12) if is_within("3, 5-7, 9-9", n)] == [3, 5, 6, 7, 9]
    assert rising_ranges(" ") == []


@pytest.mark.parametrize("text", ["0", "0-3", "3-2", "3,3", "3-5,5", "5,3", "a", "3-", "-3", "1,,2"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        rising_ranges(text)
