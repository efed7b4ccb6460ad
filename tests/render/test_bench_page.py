"""The page of a report: whole, self-contained, escaped, every row and finding in it."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.bench.report import BenchName
from mpctl.render.charts.reports import report_charts
from mpctl.render.html.bench import LEAD, bench_page
from mpctl.render.html.bench_cells import cell, findings_parts
from mpctl.render.html.bench_headline import headline
from mpctl.render.markup import join
from tests.bench.reports import ENVIRONMENT, MADE, made_report, row, verify_report
from tests.render.test_page import EVIL, Reader


def page(report: Any) -> str:
    return bench_page(report, report_charts(report), where="laptop")


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
    told = "".join(seen.words)
    assert all(each["name"] in told for each in MADE[name]()["results"])
    assert f"mpctl bench {name}" in told and "A processor" in told


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("seconds", 0.012, "12.0 ms"),
        ("seconds_max", 2, "2.00 s"),
        ("latency", 2e-5, "20 µs"),
        ("intra_node.start", 2e-4, "200 µs"),
        ("load_at_start", 0.5, "0.5"),
        ("busbw", 12.345e9, "12.35 GB/s"),
        ("algbw", 1.5e6, "0.0015 GB/s"),
        ("flops_per_second", 4e10, "40.0 GFLOP/s"),
        ("flops", 8.3e9, "8.3B"),
        ("planned_memory_bytes", 2**27, "128.0 MiB"),
        ("efficiency", 0.761, "76.1 %"),
        ("memory_error", -0.031, "-3.1 %"),
        ("bias", 0.02, "+2.0 %"),
        ("tokens_per_second", 12345.6, "12,346"),
        ("count", 1048576, "1,048,576"),
        ("speed_up", 1.2345, "1.234"),
        ("huge", 1e300, "1e+300"),
        ("is_rehearsal", True, "yes"),
        ("mfu", None, ""),
        ("seconds", "soon", "soon"),
        ("bytes", 10**400, str(10**400)),
        ("x", [1, 2], "2 entries"),
    ],
)
def test_figures_have_the_unit_that_their_key_names(key: str, value: object, told: str) -> None:
    assert cell(key, value) == told


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("verify", [("step time, within cores", "5.0% off"),
                    ("rank correlation, within cores", "0.99"),
                    ("inside of the band, within cores", "100%")]),
        ("scaling", [("strong scaling, 2 ranks", "96%"), ("weak scaling, 2 ranks", "96%")]),
        ("collectives", [("largest bus bandwidth", "5.96 GB/s")]),
        ("machine", [("step time, layout left out", "10.0% off"),
                     ("largest bus bandwidth", "5.96 GB/s"), ("fastest product", "32.0 GFLOP/s"),
                     ("triad of a rank", "10 GB/s")]),
        ("kernels", [("fastest product", "32.0 GFLOP/s"), ("triad of a rank", "10 GB/s")]),
    ],
)  # fmt: skip
def test_a_page_begins_with_its_figures(name: str, told: list[tuple[str, str]]) -> None:
    """16 MiB in 20 us + 16 MiB / 6 GB/s are 5.96 GB/s."""
    assert headline(MADE[name]()) == told
    text = "".join(Reader(page(MADE[name]())).words)
    assert all(f"{what}{figure}" in text for what, figure in told)


def test_every_bench_has_its_sentence() -> None:
    assert set(LEAD) == set(get_args(BenchName))


def test_what_all_rows_share_is_said_once() -> None:
    rows = [row(name, 0.1 * at, dtype="fp32", ranks=2, note="", mfu=None)
            for at, name in enumerate("abcd", 1)]  # fmt: skip
    seen = Reader(page(made_report("kernels", rows)))
    columns = [word for word in seen.words if word in ("dtype", "ranks", "seconds")]
    assert columns == ["seconds"]
    assert "In every row: rounds 3, dtype fp32, ranks 2." in "".join(seen.words)


def test_every_bench_says_what_it_is() -> None:
    assert LEAD.keys() == set(get_args(BenchName))


def test_a_column_that_repeats_the_name_is_left_out() -> None:
    text = "".join(Reader(page(verify_report())).words)
    assert "layout" not in text[text.index("Every row of the report") : text.index("pp4")]


def test_findings_become_tables() -> None:
    found = {"ranks": 4, "groups": {"all": {"mape": 0.04}, "within cores": {"mape": 0.03}},
             "layer": {"hidden": 64}, "fits": [{"kind": "all_reduce", "bandwidth": 5e9}],
             "files": ["devices/x.toml"], "none": [], "empty": {}}  # fmt: skip
    seen = Reader(join(findings_parts(found)))
    assert seen.words == [
        "Findings", "ranks", "4",
        "groups", "name", "mape", "all", "4.0 %", "within cores", "3.0 %",
        "layer", "hidden", "64",
        "fits", "name", "kind", "bandwidth", "1", "all_reduce", "5.00 GB/s",
        "files", "devices/x.toml",
    ]  # fmt: skip


def test_a_long_list_is_folded() -> None:
    for count, is_folded in ((20, False), (21, True)):
        seen = Reader(join(findings_parts({"fits": [{"latency": 1e-5}] * count})))
        assert bool(seen.of("details")) == is_folded and len(seen.of("tr")) == count + 1


def test_what_lowers_the_worth_of_figures_is_said_first() -> None:
    report = verify_report() | {
        "is_complete": False, "environment": ENVIRONMENT | {"load_at_start": 7.0},
    }  # fmt: skip
    text = "".join(Reader(page(report)).words)
    head = text[: text.index("Every row of the report")]
    for words in ("! Not complete", "4 rows of 12: a rehearsal", "the load average is 7.0"):
        assert words in head
    assert "! " not in page(made_report("kernels", [row("a", 1.0)])).partition("<body>")[2]


def test_words_of_a_report_stay_words() -> None:
    report = made_report("kernels", [row(EVIL, 1.0, kernel=EVIL, flops=1, bytes=1,
                                         flops_per_second=1.0)], job=EVIL, command=EVIL,
                         findings={EVIL: EVIL, "t": {EVIL: {EVIL: 1}}})  # fmt: skip
    seen = Reader(page(report))
    assert not seen.of("script") and not seen.of("img")
    assert not [a for _, a in seen.found if "onclick" in a]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(findings=st.dictionaries(st.text(max_size=5), JSON, max_size=4), key=st.text(), value=JSON)
def test_any_findings_and_keys_are_shown(findings: Any, key: str, value: Any) -> None:
    rows = [row("a", 1.0) | ({} if key in row("a", 1.0) else {key: value}), row("b", 2.0)]
    Reader(page(made_report("machine", rows, findings=findings)))
