"""A tensor of a shard, or some of its rows, with the bytes that hold it compared once."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch

from mpctl.core.errors import InputError
from mpctl.records.checkpoint.manifest import CheckpointDamaged, ShardRecord, sha256
from mpctl.records.checkpoint.tensor_header import read_header
from mpctl.train.checkpoint import tensor_file
from mpctl.train.checkpoint.tensor_file import DTYPES, BlockChecksums, Entry, ShardReader, write_file

BLOCK = 256
TENSORS = {
    "a/value": torch.arange(400.0).reshape(20, 20),
    "b/value": torch.arange(30).bfloat16().reshape(3, 10),
    "c/value": torch.zeros(0, 4),
    "d/value": torch.tensor(7.0),
}


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, ShardRecord]:
    """A shard in a checkpoint, and its record with blocks of 256 bytes."""
    path = tmp_path / "checkpoints/step-4/shard-0.safetensors"
    path.parent.mkdir(parents=True)
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries = [Entry(name, names[t.dtype], tuple(t.shape), lambda t=t: t) for name, t in TENSORS.items()]
    written = write_file(path, entries, lambda count: None)
    blocks = BlockChecksums(BLOCK)
    blocks.update(memoryview(path.read_bytes()))
    checksums = {"block_bytes": BLOCK, "crc32": blocks.values}
    record = {"bytes": written.bytes, "sha256": written.sha256, "parameters": {}}
    return path, ShardRecord.model_validate_json(json.dumps(record | {"checksums": checksums}))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_tensors_and_rows_are_read_to_the_bit(shard: tuple[Path, ShardRecord]) -> None:
    reader = ShardReader(*shard)
    for name, tensor in TENSORS.items():
        read = reader.read(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)
    assert torch.equal(reader.read("a/value", slice(3, 17)), TENSORS["a/value"][3:17])
    assert reader.read("b/value", slice(2, 2)).shape == (0, 10)
    assert len(reader.verified) == len(shard[1].checksums.crc32)  # type: ignore[union-attr]


def test_only_what_is_read_is_compared_and_that_once(
    shard: tuple[Path, ShardRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record = shard
    start = read_header(path)["a/value"].start
    flip(path, start + 19 * 80)  # the last row
    counted: list[int] = []
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data: counted.append(len(data)) or crc32(data))
    reader = ShardReader(path, record)
    for _ in range(3):
        assert torch.equal(reader.read("a/value", slice(0, 8)), TENSORS["a/value"][:8])
    header, rows = range(start // BLOCK + 1), range(start // BLOCK, (start + 640 - 1) // BLOCK + 1)
    assert reader.verified == {*header, *rows} and len(counted) == len(reader.verified)
    with pytest.raises(CheckpointDamaged, match="CRC-32 of bytes") as no:
        reader.read("a/value")
    assert no.value.folder == path.parent


def test_a_bit_anywhere_is_seen(shard: tuple[Path, ShardRecord]) -> None:
    """In the length of the header, the header, and the tensors; by CRC-32 or by sha256."""
    path, record = shard
    old = record.model_copy(update={"checksums": None})
    for place in (0, 9, 60, path.stat().st_size - 1):
        flip(path, place)
        for each in (record, old):
            reader = ShardReader(path, each)
            with pytest.raises(CheckpointDamaged):
                for name in TENSORS:
                    reader.read(name)
        flip(path, place)


def test_a_shard_of_an_older_version_is_hashed_once(
    shard: tuple[Path, ShardRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(tensor_file, "sha256", lambda path: hashed.append(path) or sha256(path))
    reader = ShardReader(shard[0], shard[1].model_copy(update={"checksums": None}))
    for name, tensor in TENSORS.items():
        assert torch.equal(reader.read(name), tensor)
    assert hashed == [shard[0]]


def test_what_is_not_there_is_bad_input(shard: tuple[Path, ShardRecord]) -> None:
    path, record = shard
    with pytest.raises(InputError, match="e/value: it is not in the file"):
        ShardReader(path, record).read("e/value")
    reader = ShardReader(path, record)
    assert "a/value" in reader.tensors
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match="ends after"):
        reader.read("a/value"), reader.read("b/value")
