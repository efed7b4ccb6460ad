"""Cut the texts of a corpus into documents and choose the documents for validation.

A file longer than 131,072 characters (128 KiB of plain English) is cut into equal shares of about
half of that; a record (a .jsonl line, a .parquet row) is a document, however long. Where that
leaves fewer than 16 documents, every text is cut instead, records too, into shares of a sixteenth
of the corpus (or of 128 characters, if that is more), so that even one small file has documents to
hold back. A share ends at the first line end after it, else at the next space, else right there;
joined, the pieces are the text. All follows from the texts alone. Tiny Shakespeare, one file of
1,115,394 characters, becomes ceil(1115394 / 65536) = 18 documents of some 62,000.

Files are read as streams, so memory holds a share of a long one, never all of it.

Document i validates if h(seed, i) < fraction * 2^64, where h is SplitMix64 (Steele, Lea and Flood,
OOPSLA 2014, figure 17) at step i of the stream that `seed` starts: a stateless function of (seed,
index), so that later runs hold back the same documents.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpctl.core.errors import InputError
from mpctl.train.data.corpus import File
from mpctl.train.data.texts import Findings, Reading, is_records, read_texts
from mpctl.train.data.tokenizer import Progress

LONGEST = 2**17  # of a file that is not cut, in characters
SHARE = 2**16
FEWEST = 16
SMALLEST_SHARE = 2**7


@dataclass(frozen=True, slots=True)
class TextCut:
    """Texts above `longest` characters are cut into shares of at most `share`."""

    longest: int = LONGEST
    share: int = SHARE
    records_whole: bool = True

    def count(self, length: int, is_record: int) -> int:
        if length <= self.longest or (is_record and self.records_whole):
            return 1
        return -(-length // self.share)


@dataclass(frozen=True, slots=True)
class CorpusDocuments:
    """Files, the texts in them, and the documents that these are cut into.

    lengths: characters of each file that is one text, 0 for a blank one. bytes: of the files,
    unpacked. report: what was passed over (Findings).
    """

    paths: list[Path]
    reading: Reading
    lengths: dict[Path, int]
    texts: int
    documents: int
    bytes: int
    cut: TextCut

    @property
    def summary(self) -> dict[str, int]:
        return {"files": len(self.paths), "texts": self.texts, "documents": self.documents, "bytes": self.bytes}

    def read(self) -> Iterator[str]:
        """The documents; InputError when they differ from those that were counted."""
        count = 0
        for count, text in enumerate(self._pieces(), start=1):
            if count <= self.documents:
                yield text
        if count != self.documents:
            raise changed(f"{count} documents now, {self.documents} a moment ago")

    def _pieces(self) -> Iterator[str]:
        for path in self.paths:
            has_records = is_records(path)
            for chunks in read_texts(path, self.reading, Findings()):
                if has_records:
                    (text,) = chunks
                    length = len(text) if text.strip() else 0
                else:
                    length = self.lengths[path]
                if length:
                    yield from split_chunks(chunks, length, self.cut.count(length, has_records))


def changed(message: str) -> InputError:
    return InputError.of("corpus-changed", "data.sources", message, "leave the files unchanged while they are prepared")


def count_corpus(files: Sequence[File], report: Progress, reading: Reading, findings: Findings) -> CorpusDocuments:
    """Count every text. Raises InputError with all faults, or for fewer than two documents."""
    lengths, is_record = array("q"), array("b")
    of_files: dict[Path, int] = {}
    meter = _Meter(sum(file.size for file in files), report)
    for file in files:
        for chunks in read_texts(file.path, reading, findings, meter.add):
            length = _length(chunks)
            if not is_records(file.path):
                of_files[file.path] = length
            if length:
                lengths.append(length)
                is_record.append(is_records(file.path))
            else:
                findings.skip("blank", file.name)
    meter.end()
    if findings.issues:
        raise InputError(findings.issues)
    cut, documents = choose_cut(lengths, is_record)
    if documents < 2:
        count = "1 document" if documents else "no document"
        message = f"found {count}, need 2: one to train on and one to validate"
        hint = f"add text: from {2 * SMALLEST_SHARE} characters on, one file is cut into several"
        raise InputError.of("corpus-too-small", "data.sources", message, hint)
    paths = [file.path for file in files]
    return CorpusDocuments(paths, reading, of_files, len(lengths), documents, findings.bytes, cut)


def _length(chunks: Iterable[str]) -> int:
    """Characters of a text; 0 for a blank one."""
    length, blank = 0, True
    for chunk in chunks:
        length += len(chunk)
        blank = blank and not chunk.strip()
    return 0 if blank else length


class _Meter:
    """Bytes read so far of the stored bytes of all files."""

    def __init__(self, total: int, report: Progress) -> None:
        self.total, self.report, self.done = total, report, 0

    def add(self, count: int) -> None:
        """The last byte is left for `end`: files may be read twice in places, or have grown."""
        done = min(self.done + count, self.total - 1)
        if done > self.done:
            self.done = done
            self.report("read", done, self.total)

    def end(self) -> None:
        self.report("read", self.total, self.total)


def choose_cut(lengths: Sequence[int], is_record: Sequence[int]) -> tuple[TextCut, int]:
    """Choose the cut of texts of these lengths; return it and the number of documents."""
    cut = TextCut()
    if sum(map(cut.count, lengths, is_record)) < FEWEST:
        share = max(SMALLEST_SHARE, sum(lengths) // FEWEST)
        cut = TextCut(share, share, records_whole=False)
    return cut, sum(map(cut.count, lengths, is_record))


def split_chunks(chunks: Iterable[str], length: int, pieces: int) -> Iterator[str]:
    """A text of `length` characters in this many pieces, at most one a character; their
    concatenation is the text.

    chunks: the text in parts of any size; memory holds some of them. InputError when they are not
    `length` characters.
    """
    chunks, marks = iter(chunks), [length * k // pieces for k in range(1, pieces + 1)]
    buffer, base, start = "", 0, 0  # the buffer begins at `base` of the text, a piece at `start`
    for mark, following in pairwise(marks):
        while base + len(buffer) < following and (chunk := next(chunks, "")):
            buffer, base = buffer[start - base :] + chunk, start
        end = base + _end_of_piece(buffer, mark - base, following - base)
        yield buffer[start - base : end - base]
        start = end
    last = buffer[start - base :] + "".join(chunks)
    if start + len(last) != length:
        raise changed(f"a text of {start + len(last)} characters now, of {length} a moment ago")
    yield last


def _end_of_piece(text: str, mark: int, following: int) -> int:
    """The first end of a line, else of a word, at `mark` or later but before `following`."""
    for separator in "\n", " ":
        index = text.find(separator, mark - 1, following - 1)
        if index >= 0:
            return index + 1
    return mark


def splitmix64(seed: int, count: int) -> NDArray[np.uint64]:
    """The first `count` outputs of SplitMix64 from `seed`, uint64 [count]."""
    steps = np.arange(1, count + 1, dtype=np.uint64)
    z = np.uint64(seed) + steps * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def validates(documents: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """True where a document validates, bool [documents]; documents >= 2, 0 < fraction < 1."""
    hashes = splitmix64(seed, documents)
    chosen = hashes < np.uint64(fraction * 2**64)
    chosen[hashes.argmin()] = True
    chosen[hashes.argmax()] = False
    return chosen
