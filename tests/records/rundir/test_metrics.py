"""A line of metrics.jsonl as a record; damaged lines and values are left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpctl.records.rundir.metrics import parse_record, scalars

RECORD: dict[str, Any] = {"step": 3, "loss": 2.0, "tokens": 30, "step_seconds": 0.5, "tokens_per_second": 20.0}


@pytest.mark.parametrize("damage", [7, "fast", [0.1], {"tp": "long"}, {"tp": None}])
def test_seconds_of_communication_that_are_no_numbers_are_left_out(damage: object) -> None:
    line = json.dumps({**RECORD, "communication_seconds": damage}).encode()
    assert parse_record(line) == RECORD


def test_seconds_of_communication_are_numbers_of_their_axes() -> None:
    line = json.dumps({**RECORD, "communication_seconds": {"tp": 0.25, "dp": 0.5}}).encode()
    record = parse_record(line)
    assert record is not None
    seconds = record["communication_seconds"]
    assert seconds == {"tp": 0.25, "dp_cp": 0.5}  # older versions called the group dp
    numbers = scalars(record)
    assert numbers["communication_seconds/tp"] == 0.25
    assert numbers["communication_seconds/dp_cp"] == 0.5
    assert parse_record(json.dumps(RECORD).encode()) == RECORD  # of an older version
