"""A search in one call: all that the command has, with the command's answers."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl import DoesNotFit, InputError, search_layouts
from mpctl.plan.search.document import search_document
from mpctl.plan.search.result import SearchResult
from tests.cli.calls import caller

CASES: list[tuple[list[object], dict[str, Any]]] = [
    ([], {}),
    (["--top", 2, "--objective", "memory"], {"top": 2, "objective": "memory"}),
    (["--gpus", "1,2", "--fix", "zero=0"], {"gpus": [2, 1], "fix": ["zero=0"]}),
    (["--gpus", "all", "--price", 2.5], {"gpus": "all", "price": 2.5}),
    (["--objective", "cost", "--max-tp", 1], {"objective": "cost", "max_tp": 1}),
    (["--max-pp", 1, "--max-cp", 1, "--exhaustive"], {"max_pp": 1, "max_cp": 1, "exhaustive": True}),
    (["--sort", "plain", "--top", 3], {"sort": "plain", "top": 3}),
    (["--headroom", 30, "--tp", 2], {"overrides": {"headroom": 30.0, "tp": 2}}),
]


def as_document(result: SearchResult) -> dict[str, Any]:
    """What the command prints of it, but for the lines to type."""
    return without_lines(search_document(result, lambda choice: ""))


def without_lines(document: Any) -> Any:
    if isinstance(document, list | tuple):
        return [without_lines(entry) for entry in document]
    if isinstance(document, dict):
        return {key: without_lines(v) for key, v in document.items() if key != "command"}
    return document


@pytest.mark.parametrize(("options", "arguments"), CASES)
def test_the_command_and_the_function_find_the_same(
    capsys: pytest.CaptureFixture[str], options: list[object], arguments: dict[str, Any]
) -> None:
    said = caller(capsys)("search", "demo", *options, "--json")
    assert as_document(search_layouts("demo", **arguments)) == without_lines(said.document)


def test_what_a_billion_tokens_cost() -> None:
    fastest = search_layouts("demo", price=2.5, top=1).fastest
    assert fastest is not None
    assert fastest.price_per_billion == pytest.approx(2.5 * fastest.gpu_hours_per_billion)
    unpriced = search_layouts("demo", top=1).fastest
    assert unpriced is not None and unpriced.price_per_billion is None


def test_progress_is_reported() -> None:
    told: list[tuple[str, int, int]] = []
    search_layouts("demo", on_progress=lambda *parts: told.append(parts))
    assert told and all(done <= total for _, done, total in told)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"top": 0}, ["top"]),
        ({"max_tp": 0, "max_pp": 1.5}, ["max_tp", "max_pp"]),
        ({"objective": "speed"}, ["objective"]),
        ({"sort": "name"}, ["sort"]),
        ({"price": -1.0}, ["price"]),
        ({"price": float("nan"), "top": -1}, ["top", "price"]),
        ({"gpus": []}, ["--gpus"]),
        ({"gpus": [0, 2]}, ["--gpus"]),
        ({"gpus": [1.5]}, ["--gpus"]),
        ({"gpus": "1,two"}, ["--gpus"]),
        ({"fix": ["zz=1"]}, ["zz"]),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: dict[str, Any], where: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        search_layouts("demo", **arguments)
    assert [issue.where for issue in refused.value.issues] == where


def test_nothing_that_fits_is_said_as_by_the_command() -> None:
    with pytest.raises(DoesNotFit):
        search_layouts("demo", {"cluster.device.memory_bytes": 10**6})
