"""What all reports share: the spread of rounds, CSV, the environment."""

from mpctl.bench.folder import csv_text
from mpctl.bench.report import bench_environment, spread


def test_spread_by_hand():
    assert spread([0.5, 0.3, 0.4]) == {
        "seconds": 0.4, "seconds_min": 0.3, "seconds_max": 0.5, "rounds": 3,
    }  # fmt: skip


def test_csv_has_a_column_for_each_key_of_any_row():
    rows = [{"name": "a, b", "sizes": {"tp": 2}}, {"name": "c", "wrong": 0, "seconds": None}]
    assert csv_text(rows).split("\r\n") == [
        "name,sizes.tp,wrong,seconds", '"a, b",2,,', "c,,0,", "",
    ]  # fmt: skip


def test_the_environment_names_the_processor():
    environment = bench_environment()
    assert environment["cores"] >= 1 and environment["machine"] and environment["host"]
