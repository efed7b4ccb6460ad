"""docs/models.md says of every family what plans, launches and has weights today."""

from __future__ import annotations

from tests.families.models_page import PAGE, page


def test_the_page_has_the_table_of_today() -> None:
    text = PAGE.read_text("utf-8")
    assert page(text) == text
