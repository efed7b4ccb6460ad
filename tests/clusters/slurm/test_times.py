"""Time limits as sbatch reads them."""

from __future__ import annotations

from math import inf

import pytest

from mpctl.clusters.slurm.times import time_limit_seconds, time_limit_text
from mpctl.errors import InputError


@pytest.mark.parametrize(
    ("text", "seconds", "shown"),
    [
        ("90", 5400, "1:30:00"),
        ("5:30", 330, "0:05:30"),
        ("12:00:00", 43200, "12:00:00"),
        ("2-3", 183600, "2-3:00:00"),
        ("2-3:04", 183840, "2-3:04:00"),
        ("2-03:04:05", 183845, "2-3:04:05"),
        ("UNLIMITED", inf, "unlimited"),
        ("infinite", inf, "unlimited"),
    ],
)
def test_each_form_of_sbatch(text: str, seconds: float, shown: str) -> None:
    assert time_limit_seconds(text) == seconds
    assert time_limit_text(seconds) == shown
    assert time_limit_seconds(shown) == seconds


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "-5", "1.5", "12h", "1-"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a time limit"):
        time_limit_seconds(text)
