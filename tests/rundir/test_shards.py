"""Which part of a parameter a file holds, as records of each version say it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mpctl.rundir.shards import ParameterPlacement
from mpctl.shard import Shard
from tests.test_shard import SHAPES, some_shards


def read(record: dict[str, Any]) -> ParameterPlacement:
    return ParameterPlacement.model_validate_json(json.dumps(record))


@given(st.data())
def test_a_placement_is_read_as_it_was_written(data: st.DataObject) -> None:
    shard = data.draw(SHAPES.flatmap(some_shards))
    updates = data.draw(st.none() | st.integers(0, 9))
    record = ParameterPlacement.of(shard, updates=updates).as_record()
    assert record.keys() == {"shape", "cuts", *({"updates"} if updates is not None else ())}
    assert (read(record).shard, read(record).updates) == (shard, updates)


@pytest.mark.parametrize(
    ("older", "shard"),
    [
        ({"dim": None, "blocks": []}, Shard((8, 4))),
        ({"dim": 1, "blocks": [[2, 4]]}, Shard((8, 4), {1: (range(2, 4),)})),
        ({"dim": 0, "blocks": [[0, 1], [4, 6]]}, Shard((8, 4), {0: (range(1), range(4, 6))})),
        ({"dim": 0, "blocks": []}, Shard((8, 4), {0: ()})),
    ],
)
def test_a_placement_of_0_1_0_is_read(older: dict[str, Any], shard: Shard) -> None:
    placement = read({"shape": [8, 4], **older, "updates": 3})
    assert (placement.shard, placement.updates) == (shard, 3)
    assert ParameterPlacement.of(placement.shard).as_record().keys() == {"shape", "cuts"}


@pytest.mark.parametrize(
    "record",
    [
        {"cuts": {"0": [[0, 9]]}},
        {"cuts": {"2": [[0, 1]]}},
        {"cuts": {"0": [[0, 4]], "1": [[0, 2], [1, 3]]}},
        {"cuts": {"0": [[4, 2]]}},
        {"cuts": {"0": [["0", 2]]}},
        {"cuts": {"0": [[0.5, 2]]}},
        {"cuts": {"0.5": [[0, 2]]}},
        {"cuts": {}, "dim": None},
        {"cuts": {}, "blocks": []},
        {"dim": 0},
        {"blocks": [[0, 2]]},
        {"dim": 0, "blocks": [[0, 2], [1, 3]]},
        {},
    ],
)
def test_what_is_no_part_is_damage(record: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read({"shape": [8, 4], **record})
