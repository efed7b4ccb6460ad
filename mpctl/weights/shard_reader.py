"""Tensors of one shard of a checkpoint, checked while they are read.

The record of a shard has the CRC-32 of each block of 4 MiB of its file (rundir/checksums.py). A
reader computes that of every block that it reads from, once, the header's included: a rank that
needs half of the rows reads and checks half of the file. Shards of older versions have no such
checksums; then the sha256 of the whole file is compared before the first tensor is read.

By hand, a file of blocks of 4 bytes, and a tensor at bytes 6 to 13: reading it checks the blocks at
4, 8 and 12 and copies 2, 4 and 2 bytes of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mpctl.errors import InputError
from mpctl.rundir.checksums import crc32
from mpctl.rundir.shards import CheckpointDamaged, ShardRecord, damage_error, sha256
from mpctl.weights.files import DTYPES
from mpctl.weights.headers import TensorHeader, read_header

CHANGED = "its bytes are not those that were written"


@dataclass
class ShardReader:
    """Reads tensors of the shard at `path`, whose record is `record`. verified: the blocks that
    were compared so far. Raises CheckpointDamaged where bytes are not those that were written."""

    path: Path
    record: ShardRecord
    verified: set[int] = field(default_factory=set)

    @cached_property
    def tensors(self) -> dict[str, TensorHeader]:
        """The tensors of the file by name; the bytes that say so are checked. Raises InputError."""
        checksums = self.record.checksums
        if checksums is None and sha256(self.path) != self.record.sha256:
            raise CheckpointDamaged(self.path, f"{CHANGED} (sha256 differs)")
        try:
            headers = read_header(self.path)
            end = min((header.start for header in headers.values()), default=0)
        except InputError as error:
            self._check_header()
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

    def _check_header(self) -> None:
        """Tell a header that was changed from one that was written so: the first block."""
        checksums = self.record.checksums
        if checksums is not None:
            self._read(0, bytearray(min(self.record.bytes, checksums.block_bytes)))

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
        """Fill `target` with bytes of one block, from byte `skipped` of it on; the whole block is
        read and compared where it was not yet."""
        size = self.record.checksums.block_bytes if self.record.checksums else 0
        whole = min(size, self.record.bytes - block * size)
        if block in self.verified or len(target) == whole:
            self._fill(file, target, block * size + skipped)
            self._compare(block, target, is_whole=len(target) == whole)
            return
        content = memoryview(bytearray(whole))
        self._fill(file, content, block * size)
        self._compare(block, content, is_whole=True)
        target[:] = content[skipped : skipped + len(target)]

    def _compare(self, block: int, content: memoryview, *, is_whole: bool) -> None:
        checksums = self.record.checksums
        if block in self.verified or checksums is None or not is_whole:
            return
        if block >= len(checksums.crc32) or crc32(content) != checksums.crc32[block]:
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
