"""Published layouts against a search: docs/recipes.md says what tests/recipes.py finds."""

from __future__ import annotations

import re

import pytest

from tests.recipes import PAGE, RECIPES, Recipe, recipe, table_line

ROW = re.compile(r"^\| ([^|]+) \|.*\| ([^|]+) \|$", re.M)
# Quick ones, and the ones that a veteran would ask for.
QUICK = ("BLOOM 176B, 384 A100, BigScience", "GPT 1T, 3,072 A100, Megatron 2021")
OURS = tuple(name for name in RECIPES if "Meta" in name or "2,048 H100, NVIDIA 25.04" in name)


def kind(verdict: str) -> str:
    """The first word of a verdict: is, tie, or behind."""
    return verdict.strip("*").split()[0]


def check(found: Recipe) -> None:
    """The page says of it what the search does today, to the last figure."""
    (row,) = (line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {found.name} |"))
    assert table_line(found) == row, "renew the page: python -m tests.recipes --write"
    assert found.given.time.total == pytest.approx(found.measured, rel=0.25)


@pytest.mark.parametrize("name", QUICK)
def test_a_published_layout_stands_where_the_page_says(name: str) -> None:
    check(recipe(name))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in QUICK])
def test_every_published_layout_does(name: str) -> None:
    check(recipe(name))


def test_most_published_layouts_are_among_the_ties() -> None:
    rows = {n: v for n, v in ROW.findall(PAGE.read_text("utf-8")) if n in RECIPES}
    assert set(rows) == set(RECIPES)
    behind = {name for name, verdict in rows.items() if kind(verdict) == "behind"}
    assert len(behind) <= len(rows) / 2
    assert not [name for name in OURS if "405B" in name and name in behind]
