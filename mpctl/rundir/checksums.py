"""CRC-32 of each block of a file, so that who reads a part of the file can check that part.

A shard of a checkpoint has one sha256, which tells whether the whole file is as it was written. A
rank of another layout reads some rows of its tensors only. It checks the blocks in which these rows
lie: CRC-32 (zlib, the polynomial of Ethernet and gzip) finds every burst of up to 32 wrong bits and
all but one in 2^32 of other changes, at three times the speed of sha256.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

BLOCK_BYTES = 1 << 22


def crc32(data: memoryview) -> int:
    """The CRC-32 of some bytes."""
    return zlib.crc32(data)


@dataclass
class BlockChecksums:
    """The checksums of a file's blocks, computed while its bytes come. values: of the blocks so
    far, the last of which may still grow; filled: bytes of that last block."""

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
