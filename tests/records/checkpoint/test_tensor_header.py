"""Headers of safetensors files from anybody: refused in words, as fast as a good one is read."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.records.checkpoint.tensor_header import read_header


def file_of(path: Path, header: str | dict[str, Any], data: int = 0) -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_header(path)
    return caught.value.issues[0].message


def test_a_name_that_is_in_it_twice_is_found_at_once(tmp_path: Path) -> None:
    """It took 46 s for these 40,000 names; the bound of a header is forty times as long."""
    empty = json.dumps(entry(0, 0, [0]))
    names = [*range(40_000), 39_999]
    header = ",".join(f'"t{number}":{empty}' for number in names)
    path = file_of(tmp_path / "double.safetensors", f"{{{header}}}")
    began = time.process_time()
    assert "t39999 is in it twice" in refused(path)
    assert time.process_time() - began < 5.0


def test_tensors_that_share_bytes(tmp_path: Path) -> None:
    shared = {"a": entry(0, 8, [2]), "b": entry(16, 24, [2]), "c": entry(4, 16, [3])}
    assert "a and c share bytes" in refused(file_of(tmp_path / "x", shared, 24))
    same = {"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}
    assert "a and b share bytes" in refused(file_of(tmp_path / "x", same, 8))


def test_empty_tensors_share_nothing(tmp_path: Path) -> None:
    header = {"a": entry(0, 8, [2]), "b": entry(4, 4, [0]), "c": entry(8, 8, [0, 7])}
    assert read_header(file_of(tmp_path / "x", header, 8)).keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("9" * 4200, "a size or an offset is more, not between 0 and 9223372036854775807"),
        (str(2**63), "is 9223372036854775808, not between 0 and"),
        ("-1", "is -1, not between"),
        ("1.5", "is 1.5, not between"),
        ('"2"', "is 2, not between"),
        ("true", "is True, not between"),
    ],
)
def test_a_size_beyond_bounds(tmp_path: Path, size: str, words: str) -> None:
    header = f'{{"t": {{"dtype": "F32", "shape": [0, {size}], "data_offsets": [0, 0]}}}}'
    message = refused(file_of(tmp_path / "x", header))
    assert words in message and len(message) < 300


def test_more_dimensions_than_a_tensor_has(tmp_path: Path) -> None:
    header = {"t": entry(0, 0, [2**62] * 65)}
    assert "65 dimensions" in refused(file_of(tmp_path / "x", header))
