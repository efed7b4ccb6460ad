"""Records as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pytest

from mpctl.core.records import json_value, to_json


class Pair(NamedTuple):
    first: int
    second: float | None = None


@dataclass(frozen=True, slots=True)
class Sums:
    pairs: tuple[Pair, ...]

    JSON_PROPERTIES: ClassVar = ("total",)

    @property
    def total(self) -> int:
        return sum(pair.first for pair in self.pairs)


def test_a_record_is_its_fields_and_the_properties_that_it_names() -> None:
    sums = Sums((Pair(1), Pair(2, 0.5)))
    pairs = [{"first": 1, "second": None}, {"first": 2, "second": 0.5}]
    assert to_json(sums) == {"pairs": pairs, "total": 3}
    assert json_value({"by": [sums.pairs, range(2)]}) == {"by": [pairs, [0, 1]]}


@pytest.mark.parametrize("value", [object(), {1, 2}, Sums])
def test_what_is_no_record_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="is no record"):
        json_value(value)
