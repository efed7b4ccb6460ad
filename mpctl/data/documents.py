"""From the texts of a corpus to its documents: which texts are cut, and where.

A file longer than 131,072 characters (128 KiB of plain English) is cut into equal shares of about
half of that; a .jsonl line is a document, however long. Where that leaves fewer than 16 documents,
every text is cut instead, lines too, into shares of a sixteenth of the corpus (or of 128
characters, if that is more), so that even one small file has documents to hold back. A share ends
at the first line end after it, else at the next space, else right there; joined, the pieces are
the text. All follows from the texts alone. By hand: Tiny Shakespeare, one file of 1,115,394
characters, becomes ceil(1115394 / 65536) = 18 documents of some 62,000.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mpctl.data.corpus import read_documents
from mpctl.data.tokenizer import Progress
from mpctl.errors import InputError, Issue

LONGEST = 2**17  # of a file that stays whole, in characters
SHARE = 2**16
FEWEST = 16
SMALLEST_SHARE = 2**7


@dataclass(frozen=True, slots=True)
class Cut:
    """Texts above `longest` characters are cut into shares of at most `share`."""

    longest: int = LONGEST
    share: int = SHARE
    lines_whole: bool = True  # of .jsonl files

    def count(self, length: int, is_line: int) -> int:
        """Pieces of a text of this length."""
        if length <= self.longest or (is_line and self.lines_whole):
            return 1
        return -(-length // self.share)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files, the texts in them, and the documents that these are cut into."""

    paths: list[Path]
    texts: int
    documents: int
    cut: Cut

    @property
    def summary(self) -> dict[str, int]:
        size = sum(path.stat().st_size for path in self.paths)
        return {
            "files": len(self.paths),
            "texts": self.texts,
            "documents": self.documents,
            "bytes": size,
        }

    def read(self) -> Iterator[str]:
        """The documents; InputError when they are not those that were counted."""
        count = 0
        for count, text in enumerate(self._pieces(), start=1):
            if count <= self.documents:
                yield text
        if count != self.documents:
            message = f"{count} documents now, {self.documents} a moment ago"
            raise InputError.of("corpus-changed", "data.sources", message, "keep the files still")

    def _pieces(self) -> Iterator[str]:
        for path in self.paths:
            for text in read_documents([path]):
                yield from split_text(text, self.cut.count(len(text), _is_lines(path)))


def count_corpus(paths: list[Path], report: Progress) -> Corpus:
    """Read every text once. InputError for every bad file, or for fewer than two documents."""
    issues: list[Issue] = []
    lengths, is_line = array("q"), array("b")
    for done, path in enumerate(paths, start=1):
        try:
            for text in read_documents([path]):
                lengths.append(len(text))
                is_line.append(_is_lines(path))
        except InputError as error:
            issues.extend(error.issues)
        report("read", done, len(paths))
    if issues:
        raise InputError(issues)
    cut, documents = choose_cut(lengths, is_line)
    if documents < 2:
        message = f"found {documents} documents, need 2: one to train on and one to validate"
        hint = f"add text: from {2 * SMALLEST_SHARE} characters on, one file is cut into several"
        raise InputError.of("corpus-too-small", "data.sources", message, hint)
    return Corpus(paths, len(lengths), documents, cut)


def choose_cut(lengths: Sequence[int], is_line: Sequence[int]) -> tuple[Cut, int]:
    """How texts of these lengths are cut, and how many documents that makes."""
    cut = Cut()
    if sum(map(cut.count, lengths, is_line)) < FEWEST:
        share = max(SMALLEST_SHARE, sum(lengths) // FEWEST)
        cut = Cut(share, share, lines_whole=False)
    return cut, sum(map(cut.count, lengths, is_line))


def split_text(text: str, pieces: int) -> Iterator[str]:
    """`text` in this many pieces, which is at most its length; their concatenation is `text`."""
    marks = [len(text) * k // pieces for k in range(1, pieces + 1)]
    start = 0
    for mark, following in pairwise(marks):
        end = _end_of_piece(text, mark, following)
        yield text[start:end]
        start = end
    yield text[start:]


def _end_of_piece(text: str, mark: int, following: int) -> int:
    """The first end of a line, else of a word, at `mark` or later but before `following`."""
    for separator in "\n", " ":
        found = text.find(separator, mark - 1, following - 1)
        if found >= 0:
            return found + 1
    return mark


def _is_lines(path: Path) -> bool:
    return path.suffix.lower() == ".jsonl"
