"""What safetensors files say of themselves, read without torch and without a tensor's bytes.

A file is 8 bytes (the header's length n, little endian), n bytes of JSON (by tensor: dtype, shape,
data_offsets), then the data; so its size follows from its header, and a truncated file is known by
it. A directory holds one `model.safetensors`, or several that `model.safetensors.index.json` maps.
https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any

from mpctl.errors import InputError, Issue

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000  # the library's own bound
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
AGAIN = "fetch the file again"


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of one tensor; dtype: the format's name, such as `BF16`; start: the
    byte of the file at which it begins."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.shape) * FLOATS[self.dtype]


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file; InputError when it is not what its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(LONGEST_HEADER, size - 8):
                raise ValueError(f"{size} bytes do not hold the header of {length} that they name")
            header = json.loads(stream.read(length))
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
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(size) is int and size >= 0 for size in (*shape, start, stop)):
            raise ValueError(f"{name}: bad shape or offsets")
        tensor = tensors[name] = TensorHeader(path, str(entry["dtype"]), shape, data + start)
        width = FLOATS.get(tensor.dtype)
        if width is not None and stop - start != prod(shape) * width:
            raise ValueError(f"{name}: {stop - start} bytes are not {tensor.dtype} {shape}")
        end = max(end, stop)
    return tensors, end


def read_folder(folder: Path) -> tuple[dict[str, TensorHeader], list[Issue]]:
    """Every tensor of a Hugging Face directory, and everything wrong with its files."""
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if not (folder / SINGLE).is_file():
        return {}, [_nothing(folder)]
    try:
        return read_header(folder / SINGLE), []
    except InputError as error:
        return {}, list(error.issues)


def _nothing(folder: Path) -> Issue:
    if any(any(folder.glob(pattern)) for pattern in PICKLES):
        return Issue("weights-pickled", str(folder), "holds weights as pickles only, which can run "
                     "code and are never opened", "save them as safetensors, where you trust them:"
                     " from_pretrained(DIR).save_pretrained(OUT) of their class")  # fmt: skip
    return Issue("weights-missing", str(folder), f"holds neither {SINGLE} nor {INDEX}",
                 "name a directory that save_pretrained wrote")  # fmt: skip


def _sharded(folder: Path) -> tuple[dict[str, TensorHeader], list[Issue]]:
    path = folder / INDEX
    try:
        mapped = json.loads(path.read_text("utf-8"))["weight_map"]
        files = sorted({str(name) for name in mapped.values()})
        if outside := [name for name in files if name != PurePath(name).name or name == ".."]:
            raise ValueError(f"{outside[0]!r} is no file of this directory")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return {}, [unreadable(path, f"no index: {type(error).__name__}: {error}").issues[0]]
    tensors: dict[str, TensorHeader] = {}
    issues: list[Issue] = []
    for name in files:
        try:
            stored = read_header(folder / name)
        except InputError as error:
            issues += error.issues
            continue
        wanted = {tensor for tensor, file in mapped.items() if file == name}
        issues += _foreign(folder / name, wanted, set(stored))
        tensors |= {tensor: stored[tensor] for tensor in wanted & stored.keys()}
    return tensors, issues


def _foreign(path: Path, wanted: set[str], stored: set[str]) -> Iterator[Issue]:
    for tensor in sorted(wanted - stored):
        yield Issue("weights-missing", str(path), f"{tensor} is not in it, but {INDEX} says so",
                    AGAIN)  # fmt: skip
    for tensor in sorted(stored - wanted):
        yield Issue("weights-foreign", str(path), f"holds {tensor}, which {INDEX} does not place "
                    "there: the shard of another model", AGAIN)  # fmt: skip


def unreadable(path: Path, why: str) -> InputError:
    """The error for a file of weights that is damaged; why: in what way."""
    return InputError.of("weights-damaged", str(path), why, AGAIN)
