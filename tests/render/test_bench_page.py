"""The page of a report: whole, self-contained, escaped, every row and finding in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from mpctl.measure.bench.report import BenchName
from mpctl.render.bench import LEAD, bench_page, headline
from tests.measure.bench.reports import ENVIRONMENT, MADE, kernels_report, verify_report
from tests.render.test_page import EVIL, Reader


def page(report: Any) -> str:
    return bench_page(report, Path("out"))


def _shown(row: dict[str, Any]) -> str:
    """What a table calls a row."""
    return str(row.get("site") or row.get("layout") or row["bytes"])


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_whole_and_accessible(name: str) -> None:
    text = page(MADE[name]())
    seen = Reader(text)
    ids = [a["id"] for _, a in seen.found if "id" in a]
    assert len(ids) == len(set(ids))
    assert all(a["href"].lstrip("#") in ids for a in seen.of("a") if a["href"])
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in seen.of("svg"))
    assert len(seen.of("table")) == len(seen.of("caption"))
    assert not seen.of("script") and "script-src" not in text
    assert not re.search(r"https?:|\bsrc=|@import|url\((?!#)", text)
    reported = "".join(seen.words)
    assert all(_shown(each) in reported for each in MADE[name]()["results"])
    assert f"mpctl bench {name}" in reported and "A processor" in reported


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        (
            "verify",
            [
                ("step time, within cores", "5.0% off"),
                ("rank correlation, within cores", "0.99"),
                ("inside of the band, within cores", "100%"),
            ],
        ),
        ("scaling", [("strong scaling, 2 ranks", "96%"), ("weak scaling, 2 ranks", "96%")]),
        ("collectives", [("largest bus bandwidth", "5.96 GB/s")]),
        (
            "machine",
            [
                ("step time, layout left out", "10.0% off"),
                ("largest bus bandwidth", "5.96 GB/s"),
                ("fastest product", "32.0 GFLOP/s"),
                ("triad of a rank", "10 GB/s"),
            ],
        ),
        ("kernels", [("fastest product", "32.0 GFLOP/s"), ("triad of a rank", "10 GB/s")]),
    ],
)
def test_a_page_begins_with_its_figures(name: str, figures: list[tuple[str, str]]) -> None:
    """16 MiB in 20 us + 16 MiB / 6 GB/s are 5.96 GB/s."""
    assert headline(MADE[name]()) == figures
    text = "".join(Reader(page(MADE[name]())).words)
    assert all(f"{what}{figure}" in text for what, figure in figures)


def test_every_bench_has_its_sentence() -> None:
    assert set(LEAD) == set(get_args(BenchName))


def test_what_lowers_the_worth_of_figures_is_said_first() -> None:
    report = verify_report() | {"is_complete": False, "environment": ENVIRONMENT | {"load_at_start": 7.0}}
    text = "".join(Reader(page(report)).words)
    head = text[: text.index("Where it was measured")]
    for words in ("! not complete", "4 ranks share 2 cores", "the load average is 7.0"):
        assert words in head
    assert "! " not in page(kernels_report()).partition("<body>")[2]


def test_words_of_a_report_stay_words() -> None:
    report = verify_report() | {"job": EVIL, "command": EVIL}
    report["results"][0] |= {"name": EVIL, "differs": EVIL}
    report["findings"]["left_out"] = {EVIL: EVIL}
    report["environment"]["host"] = EVIL
    seen = Reader(page(report))
    assert not seen.of("script") and not seen.of("img")
    assert not [a for _, a in seen.found if "onclick" in a]
