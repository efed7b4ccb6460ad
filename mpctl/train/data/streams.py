"""Files of a corpus as streams: plain, .gz or .zst, unpacked a block at a time.

Memory does not grow with the unpacked size, so a small file that unpacks to gigabytes costs time
but no memory. A file that was cut off is an error, never a shorter text.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal, cast

import zstandard

Format = Literal["text", "jsonl", "parquet"]
OnBytes = Callable[[int], None]
"""Called with how many bytes of the file, as stored, were read since the last call."""

PACKED_SUFFIXES = (".gz", ".zst")
READ_BYTES = 2**17
# A .zst block of this size unpacks to 16 MiB at most (128 KiB for every 4 bytes).
ZSTD_BLOCK = 2**9
READ_ERRORS = (OSError, EOFError, UnicodeError, zlib.error, zstandard.ZstdError)


def is_packed(path: Path) -> bool:
    return path.suffix.lower() in PACKED_SUFFIXES


def content_suffix(path: Path) -> str:
    """The suffix of a file's content, in lower case: `.jsonl` of a.jsonl and of a.jsonl.gz."""
    name = path.name.lower()
    return PurePath(name.removesuffix(path.suffix.lower()) if is_packed(path) else name).suffix


def format_of(path: Path) -> Format:
    """Return the format of a file by its name: one text, one a line, or a column of them."""
    if content_suffix(path) == ".jsonl":
        return "jsonl"
    return "parquet" if path.suffix.lower() == ".parquet" else "text"


class _Counted(io.FileIO):
    """A file that reports how many of its bytes were read."""

    def __init__(self, path: Path, on_bytes: OnBytes) -> None:
        super().__init__(path)
        self._on_bytes = on_bytes

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._on_bytes(count)
        return count


class _Unpacked(io.RawIOBase):
    """The content of a .zst stream, frame after frame; EOFError where the last one is cut off.

    zstandard's reader accepts a stream that ends inside a frame.
    """

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._frame: Any = None  # the one that is being unpacked
        self._input = b""
        self._ready = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._advance():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        self._position += count
        return count

    def _advance(self) -> bool:
        """Unpack one more block into `_ready`; False at the end of the file."""
        block = self._input or self._packed.read(ZSTD_BLOCK)
        self._input = b""
        if not block:
            if self._frame is not None:
                raise EOFError("the file ends inside a compressed block")
            return False
        frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(frame.decompress(block))
        self._input, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        return True


def ignore_bytes(count: int) -> None:
    pass


@contextmanager
def open_bytes(path: Path, on_bytes: OnBytes = ignore_bytes) -> Iterator[BinaryIO]:
    """The content of a file, unpacked where its name ends in .gz or .zst.

    Opening and reading raise one of READ_ERRORS.
    """
    with ExitStack() as stack:
        stored = stack.enter_context(io.BufferedReader(_Counted(path, on_bytes), READ_BYTES))
        content: Any = stored
        if path.suffix.lower() == ".gz":
            content = stack.enter_context(gzip.GzipFile(fileobj=stored))
        elif path.suffix.lower() == ".zst":
            content = stack.enter_context(io.BufferedReader(_Unpacked(stored), READ_BYTES))
        yield cast(BinaryIO, content)


@contextmanager
def open_text(
    path: Path, encoding: str, *, newline: str | None = None, on_bytes: OnBytes = ignore_bytes
) -> Iterator[io.TextIOWrapper]:
    """The same as characters; what cannot be decoded becomes U+FFFD. newline: as for open()."""
    with open_bytes(path, on_bytes) as content:
        yield io.TextIOWrapper(content, codec_name(encoding), errors="replace", newline=newline)


def position(stream: io.TextIOWrapper) -> int:
    return cast(BinaryIO, stream.buffer).tell()


def codec_name(encoding: str) -> str:
    """Python's codec for an encoding; that of UTF-8 leaves a byte order mark out."""
    name = codecs.lookup(encoding).name
    return "utf-8-sig" if name == "utf-8" else name


def content_size(path: Path, *, limit: int) -> int:
    """Bytes that a file unpacks to, counted up to just above `limit`; raises READ_ERRORS."""
    if not is_packed(path):
        return path.stat().st_size
    size = 0
    with open_bytes(path) as content:
        while size <= limit and (block := content.read(READ_BYTES)):
            size += len(block)
    return size
