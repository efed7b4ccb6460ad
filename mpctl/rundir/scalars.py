"""A record of metrics.jsonl as named numbers: what plots, metrics.csv and TensorBoard show.

A name is the record's own key. Lists and tables become numbers: `memory_bytes` is that of the
fullest rank, `validation_losses` of a corpus NAME becomes `validation_loss/NAME`. Validation before
the first step stands in step 1's record and becomes numbers of step 0.

>>> record = {"step": 1, "memory_bytes": [7, 9], "initial_validation_loss": 6.0}
>>> list(points(record))
[Point(step=0, values={'validation_loss': 6.0}), Point(step=1, values={'memory_bytes': 9})]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

Record = dict[str, Any]
# The order of metrics.csv's columns; what a record has beyond these follows by name.
COLUMNS = ("tokens", "loss", "validation_loss", "learning_rate", "grad_norm", "step_seconds",
           "tokens_per_second", "cpu_seconds", "memory_bytes")  # fmt: skip
NOT_MEASURED = ("step", "time", "predicted_step_seconds")
INITIAL = "initial_"


class ScalarPoint(NamedTuple):
    """The numbers of one step; step 0 is before training."""

    step: int
    values: dict[str, float]


def points(record: Record) -> Iterator[ScalarPoint]:
    """One point of a record, or two where it tells of the validation before training."""
    before = {k.removeprefix(INITIAL): v for k, v in record.items() if k.startswith(INITIAL)}
    if before and (values := scalars(before)):
        yield ScalarPoint(record["step"] - 1, values)
    yield ScalarPoint(record["step"], scalars(record))


def scalars(record: Record) -> dict[str, float]:
    """Every finite number of a record by name; what is not a number is left out."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if key in NOT_MEASURED or key.startswith(INITIAL):
            continue
        if key == "validation_losses" and isinstance(value, dict):
            found |= {f"validation_loss/{name}": v for name, v in value.items() if is_number(v)}
        elif key == "memory_bytes" and isinstance(value, list):
            found |= {key: max(value)} if value and all(map(is_number, value)) else {}
        elif is_number(value):
            found[key] = value
    return found


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def ordered(names: Iterable[str]) -> list[str]:
    """Metric names in the order of COLUMNS, others after them by name."""
    place = {name: index for index, name in enumerate(COLUMNS)}
    return sorted(set(names), key=lambda name: (place.get(name, len(place)), name))
