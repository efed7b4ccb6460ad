"""A part of any cut is put together from the parts of any other, each element once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.core.shard import Shard
from mpctl.core.tensor_grid import TensorGrid
from mpctl.records.checkpoint.manifest import MANIFEST
from mpctl.train.checkpoint.reader import OpenCheckpoint
from mpctl.train.checkpoint.tensor_file import ShardReader
from mpctl.train.layers.parameters import take
from tests.core.test_shard import some_shards
from tests.train.checkpoint.shards import grid_shard, save_shards, shard_path
from tests.train.layers.oracle import numbers

H, F, V = 72, 144, 144  # what 2, 3, 4 and 8 parts divide
PARAMETERS: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]] = {
    "word": ((V, H), ("vocab", "hidden"), ()),
    "position": ((10, H), ("seq", "hidden"), ()),
    "qkv": ((2 * F, H), ("heads", "hidden"), (F, F // 2, F // 2)),
    "qkv.bias": ((2 * F,), ("heads",), (F, F // 2, F // 2)),
    "down": ((H, F), ("hidden", "ffn"), ()),
    "norm": ((H,), ("hidden",), ()),
}
FULL = {name: numbers(*shape, seed=i) for i, (name, (shape, *_)) in enumerate(PARAMETERS.items())}
GRIDS = {
    "1d": TensorGrid.of("1d", 1),
    "1d 4": TensorGrid.of("1d", 4),
    "2d 4": TensorGrid.of("2d", 4),
    "2d 9": TensorGrid.of("2d", 9),
    "2.5d 4": TensorGrid.of("2.5d", 4, 1),
    "2.5d 8": TensorGrid.of("2.5d", 8, 2),
    "3d 8": TensorGrid.of("3d", 8),
}


def shards_of(grid: TensorGrid) -> list[dict[str, Shard]]:
    """By rank: the part of each parameter."""
    return [
        {name: grid_shard(grid, rank, shape, dims, fused) for name, (shape, dims, fused) in PARAMETERS.items()}
        for rank in range(grid.size)
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each grid."""
    folder = tmp_path_factory.mktemp("grids")
    return {kind: save_shards(folder / kind, FULL, shards_of(g)) for kind, g in GRIDS.items()}


@pytest.mark.parametrize("of", GRIDS)
def test_every_mode_reads_every_other(saved: dict[str, Path], of: str) -> None:
    checkpoint = OpenCheckpoint.of(saved[of])
    for kind, grid in GRIDS.items():
        for rank, shards in enumerate(shards_of(grid)):
            for name, shard in shards.items():
                found = checkpoint.part(name, "value", shard)
                assert torch.equal(found, take(shard, FULL[name])), (of, kind, rank, name)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which shard was read, and how many elements."""
    read: list[tuple[str, int]] = []
    original = ShardReader.read

    def counted(reader: ShardReader, name: str, rows: slice | None = None) -> Tensor:
        found = original(reader, name, rows)
        read.append((reader.path.stem, found.numel()))
        return found

    monkeypatch.setattr(ShardReader, "read", counted)
    return read


def test_what_several_ranks_hold_is_read_once(saved: dict[str, Path], reads: list[tuple[str, int]]) -> None:
    """Of 2.5d each matrix is in d files, of 1d each norm in all."""
    for kind in GRIDS:
        checkpoint = OpenCheckpoint.of(saved[kind])
        for name, full in FULL.items():
            reads.clear()
            assert torch.equal(checkpoint.part(name, "value", Shard(tuple(full.shape))), full)
            assert sum(count for _, count in reads) == full.numel(), (kind, name)


def test_rows_alone_are_read(saved: dict[str, Path], reads: list[tuple[str, int]]) -> None:
    """Rows 36 to 72 of a 2 x 2 grid lie in two files of four, in half of each."""
    OpenCheckpoint.of(saved["2d 4"]).part("word", "value", Shard((V, H), {0: (range(36, 72),)}))
    assert reads == [("shard-0", 36 * 36), ("shard-1", 36 * 36)]


@settings(max_examples=30, deadline=None)
@given(draws=st.data())
def test_any_cuts_read_any_others(tmp_path_factory: pytest.TempPathFactory, draws: st.DataObject) -> None:
    """Random parts of random files: what some file holds is read, what no file holds is counted."""
    shape = tuple(draws.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    full = numbers(*shape)
    parts = draws.draw(st.lists(some_shards(shape), min_size=1, max_size=4))
    target = draws.draw(some_shards(shape))
    folder = tmp_path_factory.mktemp("cuts")
    checkpoint = OpenCheckpoint.of(save_shards(folder, {"w": full}, [{"w": part} for part in parts]))
    wanted, known = take(target, full), torch.zeros(shape, dtype=torch.bool)
    for part in parts:
        for box in part.boxes():
            known[tuple(slice(span.start, span.stop) for span in box)] = True
    lacking = int((~take(target, known)).sum())
    if lacking:
        with pytest.raises(InputError, match=f"w: {lacking} of its elements are in no shard"):
            checkpoint.part("w", "value", target)
    else:
        assert torch.equal(checkpoint.part("w", "value", target), wanted)


# ---------------------------------------------------------------- padding


def padded(kind: str, rows: int, folder: Path) -> OpenCheckpoint:
    """A word table of 130 words and padding up to `rows`, cut as a grid cuts it."""
    grid = GRIDS[kind]
    full = torch.full((rows, H), torch.nan, dtype=torch.float64)
    full[:130] = FULL["word"][:130]
    ranks = [{"word": grid_shard(grid, rank, (rows, H), ("vocab", "hidden"))} for rank in range(grid.size)]
    return OpenCheckpoint.of(save_shards(folder, {"word": full}, ranks))


@pytest.mark.parametrize(("of", "rows"), [("1d", 132), ("2d 4", 136), ("3d 8", 160)])
@pytest.mark.parametrize("to", ["1d 4", "2d 9", "3d 8"])
def test_padding_may_be_of_another_height(tmp_path: Path, of: str, rows: int, to: str) -> None:
    checkpoint, grid, held = padded(of, rows, tmp_path), GRIDS[to], torch.zeros(144, H).double()
    for rank in range(grid.size):
        shard = grid_shard(grid, rank, (144, H), ("vocab", "hidden"))
        for box in shard.boxes():
            part = checkpoint.part("word", "value", shard, 130)[shard.slices(box)]
            held[tuple(slice(span.start, span.stop) for span in box)] = part
    assert torch.equal(held[:130], FULL["word"][:130])
    with pytest.raises(InputError, match=r"holds \(\d+, 72\), the model needs \(144, 72\)"):
        checkpoint.part("word", "value", shard)


def test_real_rows_are_no_padding(tmp_path: Path) -> None:
    checkpoint = padded("2d 4", 136, tmp_path)
    target = Shard((144, H), {0: (range(128, 144),), 1: (range(30, 40),)})
    assert checkpoint.part("word", "value", target, 130).shape == (16, 10)
    with pytest.raises(InputError, match="word: 20 of its elements are in no shard"):
        checkpoint.part("word", "value", target, 138)


# ---------------------------------------------------------------- damage


def harmed(folder: Path, index: int, cuts: dict[str, Any]) -> OpenCheckpoint:
    """With other cuts of `down` in the record of one shard."""
    path = shard_path(folder, index).with_suffix(".json")
    record = json.loads(path.read_text())
    record["parameters"]["down"]["cuts"] = cuts
    path.write_text(json.dumps(record))
    return OpenCheckpoint.of(folder)


def test_parts_that_leave_a_gap_are_reported(tmp_path: Path) -> None:
    """Two ranks that claim the same block count once; so does a file that is gone."""
    folder = save_shards(tmp_path, FULL, shards_of(GRIDS["2d 4"]))
    whole = Shard((H, F))
    checkpoint = harmed(folder, 3, {"0": [[36, 72]], "1": [[0, 72]]})
    with pytest.raises(InputError, match="down: 2,592 of its elements are in no shard"):
        checkpoint.part("down", "value", whole)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"shards": manifest["shards"][:3]}))
    with pytest.raises(InputError, match="word: 2,592 of its elements are in no shard"):
        OpenCheckpoint.of(folder).part("word", "value", Shard((V, H)))


@pytest.mark.parametrize("cuts", [{"0": [[36, 72]], "1": [[72, 73]]}, {"1": [[72, 144]]}, {}])
def test_a_tensor_of_another_shape_than_recorded_is_damage(tmp_path: Path, cuts: dict[str, Any]) -> None:
    """Also where torch would repeat a single column for the others."""
    folder = save_shards(tmp_path, FULL, shards_of(GRIDS["2d 4"]))
    checkpoint = harmed(folder, 3, cuts)
    with pytest.raises(InputError, match=r"shard-3\.safetensors.*its record says"):
        checkpoint.part("down", "value", Shard((H, F), {0: (range(40, 50),), 1: (range(72, 73),)}))
