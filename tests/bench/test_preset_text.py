"""Presets as TOML: what was put in is read back, and comments stand beside their values."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.bench.machine_preset import preset_text

# TOML has no surrogates and, unlike JSON, does not allow DEL as it is.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"))


def test_values_come_before_tables_with_comments_beside_them() -> None:
    table = {"peak": {"fp32": 1.853e11}, "name": "a", "inner": {"link": {"count": 2}, "on": True}}
    text = preset_text(table, head=["one", "two"], comments={"peak.fp32": "best", "name": "here"})
    assert text.startswith('# one\n# two\nname = "a"  # here\n\n[peak]\nfp32 = 1.853e+11  # best\n')
    assert tomllib.loads(text) == table


@given(TEXTS, st.floats(1e-9, 1e18), st.integers(0, 2**60))
def test_what_was_written_is_read(text: str, value: float, count: int) -> None:
    table = {"text": text, "inner": {"value": value, "count": count}}
    found = tomllib.loads(preset_text(table, head=[], comments={}))
    assert (found["text"], found["inner"]["count"]) == (text, count)
    assert found["inner"]["value"] == pytest.approx(value, rel=1e-3)
