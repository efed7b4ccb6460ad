"""Megatron's indexed dataset: PREFIX.bin holds all tokens in a row, PREFIX.idx cuts them up.

The law of the .idx is in index_file.py; the .bin has no header: documents of 3 and 1 uint16
tokens make 8 bytes. Source: megatron-core 0.16.1, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import os
from array import array
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpctl.data.index_file import check_size, encode_index, read_index, token_dtype
from mpctl.errors import InputError

__all__ = ["IndexedDataset", "IndexedWriter", "token_dtype"]


def _path(prefix: Path, suffix: str) -> Path:
    return Path(f"{prefix}{suffix}")  # with_suffix would eat the end of `corpus.v2`


class IndexedWriter:
    """Writes PREFIX.bin while documents arrive and PREFIX.idx at the end of the `with` block.

    Both carry the suffix `.part` until then. A block left by an exception removes them and
    leaves an older pair as it was.
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
                f"token ids {low} to {high} do not fit {self.dtype.name}, "
                f"which holds {bounds.min} to {bounds.max}",
                "give the vocabulary size that the tokenizer really has",
            )
        self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._lengths.append(tokens.size)
        self.tokens += tokens.size

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
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
        # An old index must never meet the new tokens: it goes first, the new one comes last.
        _path(self.prefix, ".idx").unlink(missing_ok=True)
        self._parts[0].replace(_path(self.prefix, ".bin"))
        self._parts[1].replace(_path(self.prefix, ".idx"))


class IndexedDataset:
    """The documents of a PREFIX.bin/.idx pair, memory-mapped.

    InputError when a file is missing, foreign, truncated, or at odds with the other one.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        bin_path, idx_path = _require_files(prefix)
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
        """Tokens of each document, int64 [documents]."""
        return np.diff(self._starts)

    def document(self, i: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Tokens [start, stop) of document i: a read-only view in the file's dtype."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.prefix}: document {i} of {len(self)}")
        return self._bin[self._starts[i] : self._starts[i + 1]][start:stop]


def _require_files(prefix: Path) -> tuple[Path, Path]:
    pair = _path(prefix, ".bin"), _path(prefix, ".idx")
    missing = [path.name for path in pair if not path.is_file()]
    if missing:
        message = f"missing: found no {' and no '.join(missing)}, expected both of the pair"
        hint = "name the pair without a suffix, or write it with `mpctl data prepare`"
        raise InputError.of("indexed-missing", str(prefix), message, hint)
    return pair
