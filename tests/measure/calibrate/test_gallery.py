"""The gallery: recorded forecasts are those of today, lines plan when pasted, the page has every row and no markup."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tests.cli.calls import Mpctl, caller
from tests.gallery import ADDED, PAGE, RUNS, SCORES, published, read, record, record_added, scores
from tests.gallery_page import page
from tests.released import RELEASED

ROWS = {row["id"]: row for row in read(RUNS)}
SAMPLE = list(ROWS)[::131]  # of every file
PLANS_WITHIN = 1e-4


@pytest.fixture
def mpctl(capsys: pytest.CaptureFixture[str]) -> Mpctl:
    return caller(capsys)


def test_every_recorded_step_is_in_the_gallery() -> None:
    steps = [row["id"] for row, kind in published() if kind == "outside" or "step_seconds" in row["measured"]]
    assert set(steps) <= ROWS.keys()
    assert len(ROWS) == len(read(RUNS)) > 1100


@pytest.mark.parametrize("name", SAMPLE)
def test_a_recorded_row_is_that_of_today(name: str) -> None:
    row, kind = next(found for found in published() if found[0]["id"] == name)
    today = record(row, kind)
    assert today is not None
    numbers = ("forecast_seconds", "low_seconds", "high_seconds")
    assert {key: today[key] for key in numbers} == pytest.approx(
        {key: ROWS[name][key] for key in numbers}, rel=PLANS_WITHIN
    )
    rest = {key: value for key, value in today.items() if key not in (*numbers, "error")}
    assert rest == {key: ROWS[name][key] for key in rest}


@pytest.mark.parametrize("name", SAMPLE[::3])
def test_a_line_plans_when_pasted(mpctl: Mpctl, name: str) -> None:
    said = mpctl(*shlex.split(ROWS[name]["line"])[1:], "--groups", "none", "--json")
    assert said.code in (0, 3)
    assert said.document["time"]["step_seconds"] == pytest.approx(ROWS[name]["forecast_seconds"], rel=PLANS_WITHIN)


def test_scores_keep_earlier_releases() -> None:
    before = [{"release": "0.0.9", "date": "2026-01-01", "source": "zb", "rows": 4, "error": 9.0}]
    found = scores(ROWS.values(), before)
    assert found[0] == before[0] and {row["release"] for row in found[1:]} == {"0.1.0", "today"}
    today = {row["source"]: row["error"] for row in read(SCORES) if row["release"] == "today"}
    assert today == {row["source"]: row["error"] for row in found if row["release"] == "today"}
    released = json.loads(RELEASED.read_text("utf-8"))["sources"]
    assert released["zb"]["error"] in {row["error"] for row in found if row["source"] == "zb"}


def test_the_page_is_that_of_the_data() -> None:
    text = page(read(RUNS), read(SCORES))
    assert text == PAGE.read_text("utf-8")
    assert text.count("<details>") == len(ROWS) and "http-equiv" in text


def test_a_row_of_a_stranger_is_escaped() -> None:
    raw: dict[str, Any] = {
        "name": "<img src=x onerror=alert(1)>",
        "line": "mpctl plan --model gpt2 --gpus 8xh100 --runtime megatron-core --set 'model.name=</script><b>'",
        "step_seconds": 0.1,
        "steps": 9,
        "software": "<script>alert(1)</script>",
        "source": "https://example.org/a?b=1&c=2",
        "date": "2026-11",
    }
    text = page([*read(RUNS)[:2], record_added(raw)], [])
    assert "<img" not in text and "<b>" not in text and text.count("<script>") == 1


def test_added_rows_are_rows() -> None:
    assert {record_added(raw)["id"] for raw in json.loads(ADDED.read_text("utf-8"))} <= ROWS.keys()
