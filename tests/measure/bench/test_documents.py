"""Reports are read completely, or refused in a sentence; everything in them is validated."""

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.measure.bench.documents import REPORTS as SCHEMAS
from mpctl.measure.bench.documents import read_report, read_reports, report_path
from mpctl.measure.bench.report import BenchName
from tests.measure.bench.reports import ENVIRONMENT, MADE, made_report, row, write_report


def test_a_folder_and_its_file_are_the_same_report(tmp_path):
    document = made_report("kernels", [row("a", 1.0, flops=12, shape={"m": 4})])
    file = write_report(tmp_path, document)
    assert read_report(tmp_path, "A") == read_report(file, "A") == document
    assert report_path(tmp_path) == file


def test_the_group_of_all_replicas_was_called_dp(tmp_path):
    old, new = (
        made_report("collectives", [row(f"all_reduce {axis}2 float32 8 gloo", 1.0, axis=axis)])
        | {"findings": {"fits": [{"axis": axis, "ranks": 2}]}}
        for axis in ("dp", "dp_cp")
    )
    write_report(tmp_path, old | {"schema": "mpctl.bench/1"})
    assert read_report(tmp_path, "A") == new


def without(table, key):
    return {name: value for name, value in table.items() if name != key}


WHOLE = made_report("kernels", [row("a", 1.0)])
REFUSED: dict[str, tuple[Any, str, str]] = {
    "not JSON": ("{", "bench-report", "is not valid JSON"),
    "a list": ([], "bench-report", "JSON object"),
    "deep": ("[" * 100_000, "bench-report", "is not valid JSON"),
    "another schema": (WHOLE | {"schema": "mpctl.plan/2"}, "bench-schema", "mpctl.plan/2"),
    "an older schema": (WHOLE | {"schema": "mpctl.bench.scaling/1"}, "bench-schema", "older"),
    "no schema": (without(WHOLE, "schema"), "bench-schema", "None"),
    "no bench": (without(WHOLE, "bench"), "bench-report", "bench"),
    "an unknown bench": (WHOLE | {"bench": "coffee"}, "bench-report", "coffee"),
    "no host": (WHOLE | {"environment": without(ENVIRONMENT, "host")}, "bench-report", "host"),
    "cores as text": (WHOLE | {"environment": ENVIRONMENT | {"cores": "2"}}, "bench-report", "environment.cores"),
    "no seconds": (WHOLE | {"results": [without(row("a", 1.0), "seconds")]}, "bench-report", "results.0.seconds"),
    "below 0": (WHOLE | {"results": [row("a", -1.0)]}, "bench-report", "results.0.seconds"),
    "NaN": (WHOLE | {"results": [row("a", float("nan"))]}, "bench-report", "NaN"),
    "infinite": (json.dumps(WHOLE).replace("1.0", "1e999"), "bench-report", "1e999"),
    "not in order": (WHOLE | {"results": [row("a", 1.0) | {"seconds_min": 2}]}, "bench-report", "seconds_min 2"),
    "twice": (WHOLE | {"results": [row("a", 1.0), row("a", 2.0)]}, "bench-report", "'a'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_report_is_refused(name, tmp_path):
    document, rule, words = REFUSED[name]
    write_report(tmp_path, document)
    with pytest.raises(InputError) as refused:
        read_report(tmp_path, "A")
    (issue,) = refused.value.issues
    assert (issue.rule, issue.where) == (rule, "A")
    assert words in issue.message and issue.hint


def test_missing_files_are_all_named_at_once(tmp_path):
    (tmp_path / "latin.json").write_bytes(b"\xff")
    with pytest.raises(InputError) as refused:
        read_reports({"A": tmp_path / "none.json", "B": tmp_path / "latin.json"})
    issues = [(issue.where, issue.rule) for issue in refused.value.issues]
    assert issues == [("A", "bench-unreadable"), ("B", "bench-report")]


@pytest.mark.parametrize("name", MADE)
def test_a_report_that_is_drawn_is_complete(name, tmp_path):
    """A key of a row, or of the findings, that is missing or of another type is named."""
    write_report(tmp_path, document := MADE[name]())
    assert read_report(tmp_path, "A", complete=True) == document
    for key in (*document["results"][0].keys() - {"reserved_bytes"}, "findings"):
        broken = MADE[name]()
        (broken if key == "findings" else broken["results"][0])[key] = {"x": object.__name__}
        write_report(tmp_path, broken)
        with pytest.raises(InputError) as refused:
            read_report(tmp_path, "A", complete=True)
        assert refused.value.issues[0].rule == "bench-report"
    write_report(tmp_path, made_report(name, [row("a", 1.0)]))
    assert read_report(tmp_path, "A")["results"][0]["name"] == "a"  # enough to be compared


def test_every_bench_has_its_record():
    assert set(SCHEMAS) == set(get_args(BenchName))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=30)
@given(key=st.sampled_from(sorted(WHOLE)), value=JSON)
def test_any_value_is_read_or_refused(key, value, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(folder, json.dumps(WHOLE | {key: value}))
    try:
        report = read_report(folder, "A")
    except InputError as error:
        assert error.issues[0].hint
    else:
        assert report["schema"] == "mpctl.bench/2"
