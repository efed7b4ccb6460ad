"""The records of a checkpoint, as each version writes them; impossible values are damage."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mpctl.core.errors import InputError
from mpctl.core.shard import Shard
from mpctl.records.checkpoint.manifest import Manifest, ParameterPlacement, ShardFile, read_manifest
from mpctl.records.checkpoint.verify import find_damage
from tests.core.test_shard import SHAPES, some_shards


def read(record: dict[str, Any]) -> ParameterPlacement:
    return ParameterPlacement.model_validate_json(json.dumps(record))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_placement_is_read_as_it_was_written(data: st.DataObject) -> None:
    shard = data.draw(SHAPES.flatmap(some_shards))
    updates = data.draw(st.none() | st.integers(0, 9))
    record = ParameterPlacement.of(shard, updates=updates).as_record()
    assert record.keys() == {"shape", "cuts", *({"updates"} if updates is not None else ())}
    assert (read(record).shard, read(record).updates) == (shard, updates)


def test_a_placement_of_0_1_0_is_read() -> None:
    cases: list[tuple[dict[str, Any], Shard]] = [
        ({"dim": None, "blocks": []}, Shard((8, 4))),
        ({"dim": 1, "blocks": [[2, 4]]}, Shard((8, 4), {1: (range(2, 4),)})),
        ({"dim": 0, "blocks": [[0, 1], [4, 6]]}, Shard((8, 4), {0: (range(1), range(4, 6))})),
        ({"dim": 0, "blocks": []}, Shard((8, 4), {0: ()})),
    ]
    for older, shard in cases:
        placement = read({"shape": [8, 4], **older, "updates": 3})
        assert (placement.shard, placement.updates) == (shard, 3)
        assert ParameterPlacement.of(placement.shard).as_record().keys() == {"shape", "cuts"}


NO_PARTS: list[dict[str, Any]] = [
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
]


def test_a_placement_that_is_no_part_is_damage() -> None:
    for record in NO_PARTS:
        with pytest.raises(ValidationError):
            read({"shape": [8, 4], **record})


SHARDS = [ShardFile(name=f"shard-{k}", coords={"pp": k // 2, "tp": k % 2}) for k in range(4)]
NEW = {"schema": "mpctl.checkpoint/3", "step": 7}
OLD = {"schema": "mpctl.checkpoint/2", "step": 7}


def manifest_of(folder: Path, document: Any) -> Manifest:
    (folder / "manifest.json").write_text(json.dumps(document))
    return read_manifest(folder)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    for manifest in (
        Manifest(step=7, shards=SHARDS),
        Manifest(step=7, shards=SHARDS[:1], save="a0", loss_scale={"scale": 2.0, "skipped": 3.0}),
        Manifest(step=0, shards=SHARDS[2:], fp8={"layers.0.mlp.up": [[0.5, 1.0, 0.0]]}),
    ):
        manifest.write(tmp_path)
        assert read_manifest(tmp_path) == manifest


def test_manifests_that_number_their_shards_are_read(tmp_path: Path) -> None:
    """Stage by stage, tp after tp; without tp, as before there were stages, all are of one."""
    found = manifest_of(tmp_path, {**OLD, "shards": 4, "tp": 2, "save": "a0"})
    assert found == Manifest(step=7, shards=SHARDS, save="a0")
    single = manifest_of(tmp_path, {"schema": "mpctl.checkpoint/1", "step": 7, "shards": 2})
    assert single == Manifest(step=7, shards=SHARDS[:2])
    assert (found.size("tp"), found.size("pp"), single.size("pp")) == (2, 2, 1)


def test_a_manifest_that_cannot_be_is_damage(tmp_path: Path) -> None:
    documents: list[Any] = [
        *({**OLD, "shards": 4, "tp": tp} for tp in (0, 3, "two", 2.0)),
        *({**OLD, "shards": shards, "tp": 1} for shards in (0, -1, 10**12, None, [])),
        {**OLD, "schema": "mpctl.checkpoint/4", "shards": 1, "tp": 1},
        *({**NEW, "shards": shards} for shards in (1, [], None, [{}], [{"name": "shard-0"}])),
        *(
            {**NEW, "shards": [{"name": name, "coords": {}}]}
            for name in ("../../x", "shard-0/../x", "shard-0\n", "shard-", "manifest", 0)
        ),
        {**NEW, "shards": [{"name": "shard-0", "coords": {"tp": -1}}]},
        {**NEW, "shards": [{"name": "shard-0", "coords": {}}] * 2},
        {**OLD, "step": 2, "shards": 1, "loss_scale": {"skipped": 3}},
        {**OLD, "step": 2, "shards": 1, "loss_scale": [1]},
        *({**OLD, "shards": 1, "loss_scale": {"skipped": n}} for n in (math.inf, math.nan, 10**400)),
        {**OLD, "step": -5, "shards": 1},
        {**OLD, "shards": 1, "fp8": {"x": [[1, 2]]}},
        {**OLD, "shards": 1, "fp8": {"x": [[1, 2, -3]]}},
    ]
    for document in documents:
        with pytest.raises(InputError) as caught:
            manifest_of(tmp_path, document)
        assert caught.value.issues[0].rule == "checkpoint-damaged"
    (tmp_path / "step-5").mkdir()
    endless = '{"schema": "mpctl.checkpoint/1", "step": 1e400}'
    for text in ("", "nul", "[]", "[" * 100_000, endless):
        (tmp_path / "step-5/manifest.json").write_text(text)
        assert [issue.rule for issue in find_damage(tmp_path / "step-5")] == ["checkpoint-damaged"]
    (tmp_path / "step-6").write_text("a file")
    assert "Not a directory" in find_damage(tmp_path / "step-6")[0].message
