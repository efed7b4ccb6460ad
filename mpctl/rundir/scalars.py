"""A record of metrics.jsonl as named numbers: what plots, metrics.csv and TensorBoard show.

A number's name is its key in the record. Lists and tables become numbers: `memory_bytes` is that of
the fullest rank, `validation_losses` of a corpus NAME becomes `validation_loss/NAME`,
`communication_seconds` of an axis becomes `communication_seconds/AXIS`. The validation before the
first step is written in step 1's record and becomes numbers of step 0.

>>> record = {"step": 1, "memory_bytes": [7, 9], "initial_validation_loss": 6.0}
>>> [tuple(point) for point in points(record)]
[(0, {'validation_loss': 6.0}), (1, {'memory_bytes': 9})]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeGuard

from mpctl.rundir.rank_files import StepRecord

COLUMNS = (
    "tokens",
    "loss",
    "validation_loss",
    "learning_rate",
    "grad_norm",
    "step_seconds",
    "tokens_per_second",
    "cpu_seconds",
    "memory_bytes",
)
"""The order of metrics.csv's columns; further numbers of a record follow by name."""
TABLES = {
    "validation_losses": "validation_loss",
    "communication_seconds": "communication_seconds",
}
"""Tables of numbers by name: their key in a record, and how their numbers' names begin."""
NOT_MEASURED = ("step", "time", "predicted_step_seconds")
INITIAL = "initial_"


class ScalarPoint(NamedTuple):
    """The numbers of one step by name; step 0 is before training."""

    step: int
    values: dict[str, float]


def points(record: StepRecord) -> Iterator[ScalarPoint]:
    """The record's step as one point, after the point of the step before where the record also
    holds the validation before training."""
    before = {k.removeprefix(INITIAL): v for k, v in record.items() if k.startswith(INITIAL)}
    if before and (values := scalars(before)):
        yield ScalarPoint(record["step"] - 1, values)
    yield ScalarPoint(record["step"], scalars(record))


def scalars(record: Mapping[str, object]) -> dict[str, float]:
    """Every finite number of a record by name; anything else is left out."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if key in NOT_MEASURED or key.startswith(INITIAL):
            continue
        if key in TABLES and isinstance(value, dict):
            numbers |= {f"{TABLES[key]}/{name}": v for name, v in value.items() if is_number(v)}
        elif key == "memory_bytes" and isinstance(value, list):
            numbers |= {key: max(value)} if value and all(map(is_number, value)) else {}
        elif is_number(value):
            numbers[key] = value
    return numbers


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value read from JSON is a finite number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def ordered(names: Iterable[str]) -> list[str]:
    """Metric names without repetition, in the order of COLUMNS, others after them by name."""
    rank = {name: index for index, name in enumerate(COLUMNS)}
    return sorted(set(names), key=lambda name: (rank.get(name, len(rank)), name))
