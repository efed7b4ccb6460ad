"""Safetensors files written tensor by tensor, so that no more than one of them is in memory, and
directories that are there whole or not at all. headers.py describes the format.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from mpctl.durable import temporary_beside
from mpctl.errors import InputError
from mpctl.rundir.checksums import BLOCK_BYTES, BlockChecksums
from mpctl.weights.headers import FLOATS

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK = 1 << 24
SYNCED = 1 << 28


@dataclass(frozen=True)
class Entry:
    """A tensor to be written; make: makes it, called when the tensor's turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.shape) * FLOATS[self.dtype]


class ChecksumsRecord(TypedDict):
    """rundir/shards.py: Checksums."""

    block_bytes: int
    crc32: list[int]


class FileDigests(TypedDict):
    """The part of rundir/shards.py's ShardRecord that is about the file."""

    bytes: int
    sha256: str
    checksums: ChecksumsRecord


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written: its size, its sha256 in hexadecimal, and the CRC-32 of each of its
    blocks of `block_bytes`, the last one shorter."""

    bytes: int
    sha256: str
    crc32: tuple[int, ...]
    block_bytes: int = BLOCK_BYTES

    def as_record(self) -> FileDigests:
        """What the record of a shard says of its file."""
        checksums: ChecksumsRecord = {"block_bytes": self.block_bytes, "crc32": list(self.crc32)}
        return {"bytes": self.bytes, "sha256": self.sha256, "checksums": checksums}


class _HashedFile:
    """A new file whose bytes are hashed on their way to the disk; `on_bytes` is told how many were
    written, every CHUNK or sooner."""

    def __init__(self, stream: FileIO, on_bytes: Callable[[int], None]) -> None:
        self.stream, self.on_bytes = stream, on_bytes
        self.digest, self.blocks = hashlib.sha256(), BlockChecksums()
        self.size = self.unsynced = 0

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            self.digest.update(chunk)
            self.blocks.update(chunk)
            done = 0
            while done < len(chunk):  # a raw write may take only a part
                done += self.stream.write(chunk[done:])
            self.size += len(chunk)
            self.unsynced += len(chunk)
            if self.unsynced >= SYNCED:
                self.sync()
            self.on_bytes(len(chunk))

    def sync(self) -> None:
        os.fsync(self.stream.fileno())
        self.unsynced = 0


def write_file(
    path: Path, entries: Sequence[Entry], on_bytes: Callable[[int], None]
) -> WrittenFile:
    """One safetensors file, on the disk when this returns. Widest types first would align best.

    on_bytes: told how many bytes of tensors were written since the last call. It is hashed while it
    is written and synchronised every SYNCED bytes, so that no long silence comes at the end.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        offsets = [end, end := end + entry.bytes]
        header[entry.name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets,
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as stream:
        file = _HashedFile(stream, lambda count: None)
        file.write(memoryview(len(text).to_bytes(8, "little") + text))
        file.on_bytes = on_bytes
        for entry in entries:
            tensor = entry.make().to("cpu", DTYPES[entry.dtype]).contiguous()
            assert tuple(tensor.shape) == entry.shape, entry.name
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        file.sync()
    return WrittenFile(file.size, file.digest.hexdigest(), tuple(file.blocks.values))


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A directory beside `out` that takes its name at the end; InputError when `out` is occupied
    or cannot be written."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError.of("out-occupied", str(out), "already holds something, nothing was "
                            "written", "name a directory that is not there yet")  # fmt: skip
    out = out.absolute()
    work = temporary_beside(out)
    try:
        work.mkdir(parents=True)
        yield work
        work.rename(out)
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        hint = "name a directory that can be written"
        raise InputError.of("out-unusable", str(out), why, hint) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
