"""Megatron's indexed dataset: PREFIX.bin holds all tokens in a row, PREFIX.idx the place of each
document. Source: megatron-core 0.16.1, megatron/core/datasets/indexed_dataset.py (_IndexWriter,
_IndexReader, DType).

Little-endian layout of the .idx, with n sequences and m document boundaries:

    9 bytes  b"MMIDIDX\\0\\0"      8 bytes  n                    8n bytes  int64 byte pointers
    8 bytes  version, 1           8 bytes  m                    8m bytes  int64 boundaries, 0 .. n
    1 byte   token type code      4n bytes int32 lengths

Two uint16 documents of 3 and 1 tokens make an .idx of 34 + 8 + 16 + 24 = 82 bytes:
pointers 0 and 6, boundaries 0 1 2; and a .bin of 8 bytes, which has no header. Files are untrusted:
every number of the header is checked against the size on disk before it is used.
"""

from __future__ import annotations

import os
import struct
from array import array
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpctl.core.errors import InputError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TYPE_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 below 65500 entries, else int32 (Megatron's DType.optimal_dtype)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def damaged(path: Path, message: str, rule: str = "indexed-damaged") -> InputError:
    """The error for a .bin or .idx file that is not what it should be."""
    return InputError.of(rule, str(path), message, "copy the pair again, or prepare it again")


def check_size(path: Path, size: int, expected: int, meaning: str) -> None:
    """InputError unless the file's size in bytes is the expected one; meaning: why it is."""
    if size != expected:
        state = "truncated" if size < expected else "too long"
        message = f"{state}: found {size} bytes, expected {expected} ({meaning})"
        raise damaged(path, message, "indexed-truncated")


def encode_index(dtype: np.dtype[Any], lengths: NDArray[np.int32]) -> bytes:
    """The .idx of documents of one sequence each; lengths int32 [documents], in tokens."""
    n = len(lengths)
    code = next(code for code, name in TYPE_CODES.items() if np.dtype(name) == dtype)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize
    return b"".join(
        (
            HEADER.pack(MAGIC, VERSION, code, n, n + 1),
            lengths.astype("<i4").tobytes(),
            pointers.astype("<i8").tobytes(),
            np.arange(n + 1, dtype="<i8").tobytes(),
        )
    )


def read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """Token type and the first token of each document, int64 [documents + 1]; or InputError.

    A document of several sequences (Megatron's sentence splits) comes out as one.
    """
    raw: Any = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else b""
    dtype, n, m = _read_header(path, raw)
    lengths = np.frombuffer(raw, "<i4", n, HEADER.size)
    pointers = np.frombuffer(raw, "<i8", n, HEADER.size + 4 * n)
    boundaries = np.frombuffer(raw, "<i8", m, HEADER.size + 12 * n)
    starts = _sequence_starts(path, dtype.itemsize, lengths, pointers)
    if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != n:
        raise damaged(path, f"document boundaries do not run from 0 to {n} sequences")
    if (np.diff(boundaries) < 0).any():
        raise damaged(path, "document boundaries go backwards")
    return dtype, starts[boundaries]


def _read_header(path: Path, raw: Any) -> tuple[np.dtype[Any], int, int]:
    """Token type, sequences n, boundaries m; InputError unless the file has that size."""
    start = bytes(raw[: len(MAGIC)])
    if not MAGIC.startswith(start):
        raise InputError.of(
            "indexed-foreign",
            str(path),
            f"found {start!r} at the start, expected {MAGIC!r}",
            "this is no Megatron index; prepare the text with `mpctl data prepare`",
        )
    if len(raw) < HEADER.size:
        message = f"truncated: found {len(raw)} bytes, expected at least {HEADER.size} (a header)"
        raise damaged(path, message, "indexed-truncated")
    _, version, code, n, m = HEADER.unpack_from(raw)
    if version != VERSION:
        raise damaged(path, f"found version {version}, expected {VERSION}", "indexed-version")
    check_size(path, len(raw), HEADER.size + 12 * n + 8 * m, f"{n} sequences, {m} boundaries")
    dtype = np.dtype(TYPE_CODES.get(code, "<f4"))
    if dtype.kind == "f":
        message = f"found token type code {code}, expected an integer type: 1 to 5, or 8"
        raise damaged(path, message, "indexed-dtype")
    return dtype, n, m


def _sequence_starts(path: Path, itemsize: int, lengths: NDArray[Any], pointers: NDArray[Any]) -> NDArray[np.int64]:
    """[n] lengths -> [n + 1] first token of each sequence, checked against the pointers."""
    if (lengths < 0).any():
        raise damaged(path, f"sequence {int((lengths < 0).argmax())} has a negative length")
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    wrong = pointers != starts[:-1] * itemsize
    if wrong.any():
        i = int(wrong.argmax())
        found, expected = int(pointers[i]), int(starts[i]) * itemsize
        raise damaged(path, f"sequence {i}: found byte pointer {found}, expected {expected}")
    return starts


def _path(prefix: Path, suffix: str) -> Path:
    return Path(f"{prefix}{suffix}")  # with_suffix would replace the end of `corpus.v2`


class IndexedWriter:
    """Writes PREFIX.bin while documents arrive and PREFIX.idx at the end of the `with` block.

    Both carry the suffix `.part` until then. An exception in the block removes them and leaves an
    older pair unchanged.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix = prefix
        self.dtype = dtype.newbyteorder("<")
        self.tokens = 0
        self._lengths = array("i")
        self._parts = _path(prefix, ".bin.part"), _path(prefix, ".idx.part")
        self._bin = self._parts[0].open("wb")

    def __len__(self) -> int:
        return len(self._lengths)

    def add_document(self, tokens: NDArray[Any]) -> None:
        """Append one document, `tokens` [length], at least one and fewer than 2^31.

        InputError when an id does not fit the dtype: stored, it would wrap to another token.
        """
        assert 0 < tokens.size < 2**31, f"a document of {tokens.size} tokens"
        bounds = np.iinfo(self.dtype)
        low, high = int(tokens.min()), int(tokens.max())
        if low < bounds.min or high > bounds.max:
            raise InputError.of(
                "token-range",
                str(self.prefix),
                f"token ids {low} to {high} do not fit {self.dtype.name}, which holds {bounds.min} to {bounds.max}",
                "give the vocabulary size that the tokenizer really has",
            )
        self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._lengths.append(tokens.size)
        self.tokens += tokens.size

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as cleanup:
            for part in self._parts:
                cleanup.callback(part.unlink, missing_ok=True)
            cleanup.callback(self._bin.close)
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        assert self.tokens, f"{self.prefix}: no document was added"
        with self._parts[1].open("wb") as idx:
            idx.write(encode_index(self.dtype, np.array(self._lengths, dtype=np.int32)))
            for stream in (self._bin, idx):
                stream.flush()
                os.fsync(stream.fileno())
        # An old index must never be next to new tokens: remove it first, add the new one last.
        _path(self.prefix, ".idx").unlink(missing_ok=True)
        self._parts[0].replace(_path(self.prefix, ".bin"))
        self._parts[1].replace(_path(self.prefix, ".idx"))


class IndexedDataset:
    """The documents of a PREFIX.bin/.idx pair, memory-mapped.

    InputError when a file is missing, foreign, truncated, or at odds with the other one.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        bin_path, idx_path = pair = _path(prefix, ".bin"), _path(prefix, ".idx")
        if missing := [path.name for path in pair if not path.is_file()]:
            message = f"missing: found no {' and no '.join(missing)}, expected both of the pair"
            hint = "name the pair without a suffix, or write it with `mpctl data prepare`"
            raise InputError.of("indexed-missing", str(prefix), message, hint)
        self.dtype, self._starts = read_index(idx_path)
        self.tokens = int(self._starts[-1])
        size = self.tokens * self.dtype.itemsize
        check_size(bin_path, bin_path.stat().st_size, size, f"{self.tokens} tokens in the index")
        if not self.tokens:
            raise InputError.of("indexed-empty", str(bin_path), "holds no tokens", "add text")
        self._bin = np.memmap(bin_path, dtype=self.dtype, mode="r")

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        return np.diff(self._starts)

    def all_tokens(self) -> NDArray[Any]:
        """The tokens of all documents, end to end: a read-only view in the file's dtype."""
        return self._bin

    def document(self, i: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Tokens [start, stop) of document i: a read-only view in the file's dtype."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.prefix}: document {i} of {len(self)}")
        return self._bin[self._starts[i] : self._starts[i + 1]][start:stop]
