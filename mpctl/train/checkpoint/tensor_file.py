"""Safetensors files: written tensor by tensor, so that no more than one of them is in memory, and
read in parts, each checked while it is read.

A file is hashed while it is written: sha256 of the file, CRC-32 of each block. A reader compares
the CRC-32 of every block that it reads from, once, the header's included: a rank that needs half of
the rows reads and checks half of the file. Shards of version 0.1.0 have no CRC-32; then the sha256
of the file is compared before the first tensor is read. tensor_header.py has the format.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.records.checkpoint.manifest import (
    CheckpointDamaged,
    Checksums,
    FileDigest,
    OnBytes,
    ShardRecord,
    damage_error,
    sha256,
)
from mpctl.records.checkpoint.tensor_header import FLOATS, TensorHeader, read_header

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_BYTES = 1 << 22  # of a CRC-32
WRITTEN_AT_ONCE = 1 << 24
SYNCED_BYTES = 1 << 28
CHANGED = "its bytes are not those that were written"


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class Entry:
    """A tensor to be written; make: makes it, called when the tensor's turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * FLOATS[self.dtype]


def in_file_order(entries: Sequence[Entry]) -> list[Entry]:
    """Widest type first, which aligns the tensors, then by name."""
    return sorted(entries, key=lambda entry: (-FLOATS[entry.dtype], entry.name))


def write_file(
    path: Path, entries: Sequence[Entry], on_bytes: OnBytes, metadata: Mapping[str, str] | None = None
) -> FileDigest:
    """One safetensors file, on the disk when this returns.

    on_bytes: called with how many bytes of tensors were written. metadata: more of the header's. The
    file is synchronised every SYNCED_BYTES, so that no long silence comes at the end.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for entry in entries:
        offsets = [end, end := end + entry.bytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as stream:
        file = _HashedFile(stream)
        file.write(memoryview(len(text).to_bytes(8, "little") + text), lambda count: None)
        for entry in entries:
            tensor = entry.make().to("cpu", DTYPES[entry.dtype]).contiguous()
            assert tuple(tensor.shape) == entry.shape, entry.name
            file.write(tensor.view(-1).view(torch.uint8).numpy().data, on_bytes)
        file.sync()
    checksums = Checksums(block_bytes=BLOCK_BYTES, crc32=file.blocks.values)
    return FileDigest(bytes=file.size, sha256=file.digest.hexdigest(), checksums=checksums)


class _HashedFile:
    def __init__(self, stream: FileIO) -> None:
        self.stream = stream
        self.digest, self.blocks = hashlib.sha256(), BlockChecksums()
        self.size = self.unsynced = 0

    def write(self, data: memoryview, on_bytes: OnBytes) -> None:
        for start in range(0, len(data), WRITTEN_AT_ONCE):
            chunk = data[start : start + WRITTEN_AT_ONCE]
            self.digest.update(chunk)
            self.blocks.update(chunk)
            done = 0
            while done < len(chunk):  # a raw write may take only a part
                done += self.stream.write(chunk[done:])
            self.size += len(chunk)
            self.unsynced += len(chunk)
            if self.unsynced >= SYNCED_BYTES:
                self.sync()
            on_bytes(len(chunk))

    def sync(self) -> None:
        os.fsync(self.stream.fileno())
        self.unsynced = 0


@dataclass
class BlockChecksums:
    """CRC-32 of a file's blocks, computed as its bytes arrive. values: of the blocks so far, the
    last of which may still grow; filled: bytes of that last block."""

    block_bytes: int = BLOCK_BYTES
    values: list[int] = field(default_factory=list)
    filled: int = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the file.

        >>> sums = BlockChecksums(block_bytes=4)
        >>> sums.update(memoryview(b"12345"))
        >>> sums.values == [zlib.crc32(b"1234"), zlib.crc32(b"5")]
        True
        """
        start = 0
        while start < len(data):
            if self.filled in (0, self.block_bytes):
                self.values.append(0)
                self.filled = 0
            stop = min(len(data), start + self.block_bytes - self.filled)
            self.values[-1] = zlib.crc32(data[start:stop], self.values[-1])
            self.filled += stop - start
            start = stop


# ---------------------------------------------------------------- reading


@dataclass
class ShardReader:
    """Reads tensors of the shard at `path`, of which `record` has the checksums. verified: the
    blocks that were compared so far. Raises CheckpointDamaged where bytes are not those that were
    written."""

    path: Path
    record: ShardRecord
    verified: set[int] = field(default_factory=set)

    @cached_property
    def tensors(self) -> dict[str, TensorHeader]:
        """The tensors of the file by name; the header's bytes are checked. Raises InputError."""
        checksums = self.record.checksums
        if checksums is None and sha256(self.path) != self.record.sha256:
            raise CheckpointDamaged(self.path, f"{CHANGED} (sha256 differs)")
        try:
            headers = read_header(self.path)
            end = min((header.start for header in headers.values()), default=0)
        except InputError as error:
            if checksums is not None:  # was the header damaged, or written like this?
                self._read(0, bytearray(min(self.record.bytes, checksums.block_bytes)))
            raise damage_error(self.path, error.issues[0].message) from None
        self._read(0, bytearray(end))
        return headers

    def header(self, name: str) -> TensorHeader:
        """Shape, type and place of the tensor `name`. Raises InputError when it is not there."""
        header = self.tensors.get(name)
        if header is None or header.dtype not in DTYPES:
            what = "it is not in the file" if header is None else f"cannot be {header.dtype}"
            raise damage_error(self.path, f"{name}: {what}")
        return header

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor `name`, or some of its rows (of its first dimension). Raises InputError, which
        is CheckpointDamaged where bytes were changed."""
        header = self.header(name)
        shape, start = header.shape, header.start
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            start += first * (header.bytes // max(1, shape[0]))
            shape = (max(0, last - first), *shape[1:])
        tensor = torch.empty(shape, dtype=DTYPES[header.dtype])
        if tensor.numel():
            self._read(start, tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor

    def _read(self, start: int, target: bytearray | memoryview) -> None:
        """Fill `target` with the file's bytes from `start` on."""
        checksums = self.record.checksums
        view = memoryview(target)
        with self.path.open("rb", buffering=0) as stream:
            if checksums is None:
                self._fill(stream.fileno(), view, start)
                return
            size, done = checksums.block_bytes, 0
            while done < len(view):
                block, skipped = divmod(start + done, size)
                count = min(len(view) - done, size - skipped)
                self._read_block(stream.fileno(), block, skipped, view[done : done + count])
                done += count

    def _read_block(self, file: int, block: int, skipped: int, target: memoryview) -> None:
        """Fill `target` with bytes of one block, from its byte `skipped` on; an unverified block is
        read and compared in full."""
        size = self.record.checksums.block_bytes if self.record.checksums else 0
        full = min(size, self.record.bytes - block * size)
        if block in self.verified or len(target) == full:
            self._fill(file, target, block * size + skipped)
            self._compare(block, target, is_full=len(target) == full)
            return
        content = memoryview(bytearray(full))
        self._fill(file, content, block * size)
        self._compare(block, content, is_full=True)
        target[:] = content[skipped : skipped + len(target)]

    def _compare(self, block: int, content: memoryview, *, is_full: bool) -> None:
        checksums = self.record.checksums
        if block in self.verified or checksums is None or not is_full:
            return
        if block >= len(checksums.crc32) or zlib.crc32(content) != checksums.crc32[block]:
            first = block * checksums.block_bytes
            where = f"bytes {first:,} to {first + len(content) - 1:,}"
            raise CheckpointDamaged(self.path, f"{CHANGED} (CRC-32 of {where} differs)")
        self.verified.add(block)

    def _fill(self, file: int, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(file, [target[done:]], offset + done)
            if not count:
                raise damage_error(self.path, f"ends after {offset + done:,} bytes")
            done += count
