"""The texts in a file of a corpus: the file itself, a .jsonl file's lines, a .parquet column; and
what was passed over or is wrong there.

A text is an iterable of consecutive strings, so that a file of gigabytes is never in memory at
once. A record (a line or a row) is one string of at most 256 MiB. Equal faults become one issue
with their count, however many lines or files have them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mpctl.core.errors import InputError, Issue
from mpctl.train.data.streams import READ_ERRORS, OnBytes, format_of, ignore_bytes, open_bytes, open_text, position

FIRST_NAMES = 5
MOST_ISSUES = 20
MOST_KEYS = 12
# Why a file, a folder or a text is passed over.
REASONS = {
    "empty": "empty",
    "binary": "binary, or not text in this encoding",
    "hidden": "hidden",
    "special": "not a regular file, or a broken link",
    "beyond-max-bytes": "beyond the limit of bytes",
    "blank": "blank",
}


@dataclass
class Tally:
    """Number of occurrences and of files with them, and the first of their names."""

    count: int = 0
    files: int = 0
    first: list[str] = field(default_factory=list)
    last: str | None = None

    def add(self, name: str, count: int = 1) -> None:
        """All occurrences in one file are added before those of the next."""
        self.count += count
        self.files += name != self.last
        self.last = name
        if len(self.first) < FIRST_NAMES and name not in self.first:
            self.first.append(name)

    def as_dict(self) -> dict[str, Any]:
        return {"count": self.count, "files": self.files, "first": self.first}


@dataclass
class Findings:
    """Filled while sources are searched and read.

    bytes: of the files, unpacked. skipped: by a key of REASONS. undecodable: characters U+FFFD in
    place of bytes that are not in the encoding. lacking: records without the key of the text; keys:
    the keys that these records have. malformed: lines that hold no JSON object.
    """

    text_key: str = "text"
    bytes: int = 0
    skipped: dict[str, Tally] = field(default_factory=dict)
    undecodable: Tally = field(default_factory=Tally)
    lacking: Tally = field(default_factory=Tally)
    keys: Counter[str] = field(default_factory=Counter)
    malformed: Tally = field(default_factory=Tally)
    others: list[Issue] = field(default_factory=list)

    def skip(self, reason: str, name: str) -> None:
        """Note that the file or text of this name was passed over, for one of REASONS."""
        assert reason in REASONS
        self.skipped.setdefault(reason, Tally()).add(name)

    def lack(self, place: str, keys: Iterable[str], count: int = 1) -> None:
        """`count` records from `place` on have no text under the key, but have these `keys`."""
        self.lacking.add(place, count)
        for key in keys:
            if key in self.keys or len(self.keys) < MOST_KEYS:
                self.keys[key] += count

    def unreadable(self, path: Path, error: Exception) -> None:
        """Note that a file could not be read, which fails the whole corpus in the end."""
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        hint = "check its permissions, or fetch it again"
        self.others.append(Issue("corpus-unreadable", str(path), f"not readable: {why}", hint))

    @property
    def issues(self) -> list[Issue]:
        """All faults, one issue for each kind."""
        found = self.others[:MOST_ISSUES]
        if (rest := len(self.others) - MOST_ISSUES) > 0:
            message = f"{_count(rest, 'more file')} cannot be read"
            found.append(Issue("corpus-unreadable", "data.sources", message, "mend those first"))
        if self.malformed.count:
            message = f"{_count(self.malformed.count, 'line')} without a JSON object: "
            hint = f'write one {{"{self.text_key}": "..."}} a line'
            found.append(Issue("corpus-jsonl", "data.sources", message + _first(self.malformed), hint))
        if self.lacking.count:
            found.append(self._lacking_issue())
        return found

    def _lacking_issue(self) -> Issue:
        keys = ", ".join(key for key, _ in self.keys.most_common()) or "none"
        message = f"{_count(self.lacking.count, 'record')} without a string under "
        message += f'"{self.text_key}": {_first(self.lacking)}; keys there: {keys}'
        hint = "name the key of the text: --text-key, data.text_key in a job"
        return Issue("corpus-text-key", "data.text_key", message, hint)

    def report(self) -> dict[str, Any]:
        """Return counts of skipped files and texts and of undecodable characters, for a manifest."""
        skipped = {reason: tally.as_dict() for reason, tally in sorted(self.skipped.items())}
        return {"skipped": skipped, "undecodable": self.undecodable.as_dict()}


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _first(tally: Tally) -> str:
    """Names of the first places; `...` where there are more."""
    return ", ".join(tally.first) + (" ..." if tally.files > len(tally.first) else "")


CHUNK = 2**20
LONGEST_RECORD = 2**28
ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings for reading texts from files. encoding: of text and .jsonl files; text_key: of a
    record's text."""

    encoding: str = "utf-8"
    text_key: str = "text"


def is_records(path: Path) -> bool:
    """Whether a file holds many texts, each of which is a document."""
    return format_of(path) != "text"


def read_texts(
    path: Path, reading: Reading, findings: Findings, on_bytes: OnBytes = ignore_bytes
) -> Iterator[Iterable[str]]:
    """Yield every text of a file, blank ones too; faults of the file go to `findings`."""
    try:
        match format_of(path):
            case "text":
                yield _chunks(path, reading, findings, on_bytes)
            case "jsonl":
                yield from _lines(path, reading, findings, on_bytes)
            case "parquet":
                yield from _rows(path, reading, findings, on_bytes)
    except READ_ERRORS as error:
        findings.unreadable(path, error)


def _chunks(path: Path, reading: Reading, findings: Findings, on_bytes: OnBytes) -> Iterator[str]:
    try:
        with open_text(path, reading.encoding, on_bytes=on_bytes) as stream:
            while chunk := stream.read(CHUNK):
                _note_undecodable(chunk, path, findings)
                yield chunk
            findings.bytes += position(stream)
    except READ_ERRORS as error:
        findings.unreadable(path, error)


def _lines(path: Path, reading: Reading, findings: Findings, on_bytes: OnBytes) -> Iterator[tuple[str]]:
    for place, line in record_lines(path, reading, findings, on_bytes):
        record = parsed(line)
        if not isinstance(record, dict):
            findings.malformed.add(place)
            continue
        text = record.get(reading.text_key, 0)
        if text is None or isinstance(text, str):
            yield (_plain(text or ""),)
        else:
            findings.lack(place, map(str, record))


def record_lines(
    path: Path, reading: Reading, findings: Findings, on_bytes: OnBytes = ignore_bytes
) -> Iterator[tuple[str, str]]:
    """Yield the place `file:number` and the text of every line of a .jsonl file that is not blank; notes a line that
    is too long, behind which nothing is read, and what cannot be decoded. Raises one of READ_ERRORS."""
    with open_text(path, reading.encoding, newline="\n", on_bytes=on_bytes) as stream:
        read_line = partial(stream.readline, LONGEST_RECORD)
        for number, line in enumerate(iter(read_line, ""), start=1):
            if len(line) == LONGEST_RECORD:
                _too_long(f"{path}:{number}", findings)
                return
            if line.strip():
                _note_undecodable(line, path, findings)
                yield f"{path}:{number}", line
        findings.bytes += position(stream)


def parsed(line: str) -> Any:
    """The value of a line of JSON; None for another line."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _plain(text: str) -> str:
    """JSON can spell half a surrogate pair, which no UTF-8 holds: it becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def _rows(path: Path, reading: Reading, findings: Findings, on_bytes: OnBytes) -> Iterator[tuple[str]]:
    parquet = require_parquet(path)
    with open_bytes(path, on_bytes) as stream:
        try:
            file = parquet.ParquetFile(stream)
            if not _has_texts(file, path, reading.text_key, findings):
                return
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[reading.text_key]):
                for text in batch.column(0).to_pylist():
                    yield (text or "",)
        except (ValueError, OSError) as error:  # pyarrow's errors are among these
            findings.unreadable(path, error)
            return
    findings.bytes += path.stat().st_size


def _has_texts(file: Any, path: Path, key: str, findings: Findings) -> bool:
    """Whether the column `key` holds strings; if not, that is noted."""
    import pyarrow.types as kinds

    schema = file.schema_arrow
    if key not in schema.names:
        findings.lack(str(path), schema.names, file.metadata.num_rows)
        return False
    kind = schema.field(key).type
    kind = kind.value_type if kinds.is_dictionary(kind) else kind
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return True
    message = f"the column {key!r} is {kind}, not strings"
    hint = "name another column: --text-key, data.text_key in a job"
    findings.others.append(Issue("corpus-text-key", str(path), message, hint))
    return False


def require_parquet(path: Path) -> Any:
    """pyarrow.parquet; InputError when it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        message = "reading .parquet needs pyarrow, which is not installed"
        hint = "pip install 'mpctl[parquet]', or convert it to .jsonl"
        raise InputError.of("parquet-extra", str(path), message, hint) from None
    return pyarrow.parquet


def parquet_size(path: Path) -> int:
    """Unpacked bytes of all columns by the file's metadata, at least the size of the file."""
    metadata = require_parquet(path).read_metadata(path)
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    unpacked: int = sum(group.total_byte_size for group in groups)
    return max(path.stat().st_size, unpacked)


def _too_long(place: str, findings: Findings) -> None:
    message = f"a line of more than {LONGEST_RECORD:,} characters"
    hint = "put it into a text file of its own, which is cut into documents"
    findings.others.append(Issue("corpus-jsonl", place, message, hint))


def _note_undecodable(text: str, path: Path, findings: Findings) -> None:
    if count := text.count("\ufffd"):
        findings.undecodable.add(path.name, count)
