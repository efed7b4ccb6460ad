"""Two reports by hand: rows that are slower, faster, noise or missing, and other differences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.measure.bench.compare import compare_reports
from tests.measure.bench.reports import ENVIRONMENT, made_report, row


def of(*rows, **more):
    return made_report("kernels", list(rows), **more)


def verdict(a, b, threshold=10.0):
    (compared,) = compare_reports(of(a), of(b), threshold)["rows"]
    return compared["verdict"]


def rounds(low, middle, high):
    return {"name": "x", "seconds": middle, "seconds_min": low, "seconds_max": high, "rounds": 3}


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ((0.9, 1.0, 1.1), (1.15, 1.2, 1.3), "slower"),
        ((0.9, 1.0, 1.1), (1.05, 1.2, 1.3), "noise"),  # 1.05 < 1.1: rounds overlap
        ((0.9, 1.0, 1.1), (1.1, 1.2, 1.3), "noise"),  # 1.1 is not beyond 1.1
        ((1.0, 1.0, 1.0), (1.1, 1.1, 1.1), "same"),  # just the threshold
        ((1.15, 1.2, 1.3), (0.9, 1.0, 1.1), "faster"),
        ((1.05, 1.2, 1.3), (0.9, 1.0, 1.1), "noise"),
        ((1.0, 1.0, 1.0), (0.95, 0.95, 0.95), "same"),
    ],
)
def test_verdicts_by_hand(a, b, told):
    assert verdict(rounds(*a), rounds(*b)) == told


def test_the_threshold_is_in_percent():
    a, b = row("x", 1.0, spread=0.001), row("x", 1.04, spread=0.001)
    assert (verdict(a, b, 3.0), verdict(a, b, 5.0)) == ("slower", "same")


def test_rows_are_matched_by_name_and_the_rest_is_named():
    a, b = of(row("x", 1.0), row("y", 2.0)), of(row("z", 9.0), row("y", 4.0), row("w", 1.0))
    comparison = compare_reports(a, b, 10.0)
    assert [(each["name"], each["ratio"]) for each in comparison["rows"]] == [("y", 2.0)]
    assert (comparison["only_in_a"], comparison["only_in_b"]) == (["x"], ["z", "w"])
    assert comparison["regressions"] == 1


def test_a_row_of_no_time_is_not_compared():
    a, b = of(row("x", 1.0), row("y", 0.0)), of(row("x", 1.0), row("y", 1.0))
    comparison = compare_reports(a, b, 10.0)
    assert [each["name"] for each in comparison["rows"]] == ["x"]
    assert comparison["only_in_b"] == ["y"]


def test_the_mean_is_geometric():
    comparison = compare_reports(of(row("x", 1.0), row("y", 1.0)), of(row("x", 2.0), row("y", 0.5)), 10.0)
    assert comparison["ratio"] == pytest.approx(1.0)


seconds = st.floats(1e-9, 1e6)


@given(seconds, seconds, st.floats(0, 0.5), st.floats(0, 100))
def test_what_is_slower_is_faster_the_other_way_round(one, other, spread, threshold):
    a, b = row("x", one, spread=spread), row("x", other, spread=spread)
    turned = {"slower": "faster", "faster": "slower"}
    told = verdict(a, b, threshold)
    assert verdict(b, a, threshold) == turned.get(told, told)
    assert verdict(a, a, threshold) == "same"


def test_other_machines_versions_and_commands_are_said():
    a = of(row("x", 1.0))
    elsewhere = ENVIRONMENT | {"cores": 4, "torch": "2.12", "load_at_start": 9.0}
    b = of(row("x", 1.0), command="bench kernels --quick", is_complete=False, environment=elsewhere)
    assert compare_reports(a, a, 10.0)["warnings"] == []
    said = " | ".join(compare_reports(a, b, 10.0)["warnings"])
    for words in ("cores 2 and 4", "torch 2.11 and 2.12", "--quick", "B is not complete", "B: the load average is 9.0"):
        assert words in said


def test_single_rounds_are_said():
    single = {**row("x", 1.0, spread=0.0), "rounds": 1}
    assert "one round" in compare_reports(of(single), of(single), 10.0)["warnings"][0]


def test_reports_of_other_benches_or_rows_are_refused():
    a = of(row("x", 1.0))
    scaling, common = made_report("scaling", [row("x", 1.0)]), "bench-nothing-common"
    for other, rule in ((scaling, "bench-differs"), (of(row("y", 1.0)), common), (of(), common)):
        with pytest.raises(InputError) as refused:
            compare_reports(a, other, 10.0)
        assert [issue.rule for issue in refused.value.issues] == [rule]
