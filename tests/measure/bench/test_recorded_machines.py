"""Machines that were measured once: what kernels and collectives alone plan, and fits to runs."""

from __future__ import annotations

import pytest

from tests.measure.bench.recorded_machines import collective_rows, kernel_rows, record_of, records, replay
from tests.measure.bench.reports import ENVIRONMENT

ALONE, FITTED = 0.10, 0.06  # mean of |planned / measured - 1| over the layouts


@pytest.mark.parametrize("name", records())
def test_plans_of_a_recorded_machine_are_near_its_runs(name: str) -> None:
    found = replay(records()[name])
    assert len(found.checks) >= 9
    assert found.errors["measured"] < ALONE
    assert found.errors["fitted"] < FITTED and found.errors["left_out"] < FITTED
    assert found.errors["fitted"] < found.errors["left_out"]


def test_a_report_gives_its_record() -> None:
    """A report with the rows of a record, whose kernels a single rank timed too."""
    record = records()["xeon"]
    kernels = [
        {**row, "name": f"{row['name']} x{ranks}", "ranks": ranks, "seconds": row["seconds"] * ranks / 2}
        for row in kernel_rows(record)
        for ranks in (1, 2)
    ]
    sent = [{**row, "name": "-"} for row in collective_rows(record)]
    slow = [{**row, "transport": "gloo", "seconds": 1.0} for row in sent]  # no run sends so
    checks = [{"layout": name, "seconds": took} for name, took in record["runs"].items()]
    report = {"environment": {**ENVIRONMENT, "cores": 2}, "results": [*kernels, *sent], "findings": {"checks": checks}}
    found = record_of(report)
    assert {key: found[key] for key in record if key != "source"} == {
        key: record[key] for key in record if key != "source"
    }
    reduced = [row for row in slow if row["kind"] == "all_reduce"]
    assert record_of({**report, "results": [*kernels, *sent, *reduced]}) == found
