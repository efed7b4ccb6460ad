"""Headers of safetensors files, read without torch and without a tensor's bytes.

A file is 8 bytes (the header's length n, little endian), n bytes of JSON (by tensor: dtype, shape,
data_offsets), then the data; so its header gives its size, which shows a truncated file.
https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from mpctl.core.errors import InputError

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
FP8 = "F8_E4M3"
WIDTHS = {**FLOATS, FP8: 1}
LONGEST_HEADER = 100_000_000  # the library's bound
LARGEST = 2**63 - 1
LONGEST_NAME, MOST_DIMS = 100, 64
AGAIN = "fetch the file again"


@dataclass(frozen=True)
class TensorHeader:
    """The entry of one tensor in a file's header; dtype: the format's name, such as `BF16`; start:
    the byte of the file at which it begins."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def bytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file; InputError when it does not match its header."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(LONGEST_HEADER, size - 8):
                raise ValueError(f"{size} bytes do not hold the header of {length} that they name")
            header = json.loads(stream.read(length), object_pairs_hook=_unique)
        tensors, end = _entries(path, header, data=8 + length)
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise unreadable(path, f"no safetensors file: {error}") from None
    if size != 8 + length + end:
        raise unreadable(path, f"has {size} bytes, its header says {8 + length + end}")
    return tensors


def _entries(path: Path, header: Any, *, data: int) -> tuple[dict[str, TensorHeader], int]:
    """The tensors that a header names, and the end of the last; data: where their bytes begin."""
    tensors: dict[str, TensorHeader] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
        for size in (*shape, start, stop):
            if type(size) is not int or not 0 <= size <= LARGEST:
                text = str(size) if type(size) is not int or size < 10**20 else "more"
                what = f"{name:.{LONGEST_NAME}}: a size or an offset is {text:.{LONGEST_NAME}}"
                raise ValueError(f"{what}, not between 0 and {LARGEST}")
        if len(shape) > MOST_DIMS or stop < start:
            what = f"{len(shape)} dimensions in bytes {start} to {stop}"
            raise ValueError(f"{name:.{LONGEST_NAME}}: {what}, at most {MOST_DIMS} in ascending bytes")
        tensor = tensors[name] = TensorHeader(path, str(entry["dtype"]), shape, data + start)
        width = WIDTHS.get(tensor.dtype)
        if width is not None and stop - start != prod(shape) * width:
            raise ValueError(f"{name}: {stop - start} bytes are not {tensor.dtype} {shape}")
        if stop > start:
            spans.append((start, stop, name))
    spans.sort()
    for (_, stop, one), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ValueError(f"{one} and {other} share bytes")
    return tensors, max((stop for _, stop, _ in spans), default=0)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of the header. Raises ValueError for a name that is in it twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice} is in it twice")
    return table


def unreadable(path: Path, why: str) -> InputError:
    """The error for a file of weights that is damaged; why: in what way."""
    return InputError.of("weights-damaged", str(path), why, AGAIN)
