"""The texts in a file of a corpus: the file itself, a .jsonl file's lines, a .parquet column.

A text is given as an iterable of strings that follow each other, so that a file of gigabytes is
never held whole. A record (a line or a row) is one string of at most 256 MiB.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpctl.data.findings import Findings
from mpctl.data.streams import READ_ERRORS, OnBytes, format_of, open_bytes, open_text, position
from mpctl.errors import InputError, Issue

CHUNK = 2**20
LONGEST_RECORD = 2**28
ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Reading:
    """How files become texts. encoding: of text and .jsonl files; text_key: of a record's text."""

    encoding: str = "utf-8"
    text_key: str = "text"


def is_records(path: Path) -> bool:
    """Whether a file holds many texts, each of which is a document of its own."""
    return format_of(path) != "text"


def read_texts(
    path: Path, reading: Reading, findings: Findings, on_bytes: OnBytes
) -> Iterator[Iterable[str]]:
    """Every text of a file, blank ones too; what is wrong with the file goes to `findings`."""
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


def _lines(
    path: Path, reading: Reading, findings: Findings, on_bytes: OnBytes
) -> Iterator[tuple[str]]:
    with open_text(path, reading.encoding, newline="\n", on_bytes=on_bytes) as stream:
        read_line = partial(stream.readline, LONGEST_RECORD)
        for number, line in enumerate(iter(read_line, ""), start=1):
            if len(line) == LONGEST_RECORD:
                _too_long(f"{path}:{number}", findings)
                return
            if not line.strip():
                continue
            _note_undecodable(line, path, findings)
            record = _parsed(line)
            if not isinstance(record, dict):
                findings.malformed.add(f"{path}:{number}")
                continue
            text = record.get(reading.text_key, 0)
            if text is None or isinstance(text, str):
                yield (_plain(text or ""),)
            else:
                findings.lack(f"{path}:{number}", map(str, record))
        findings.bytes += position(stream)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _plain(text: str) -> str:
    """JSON can spell half a surrogate pair, which no UTF-8 holds: it becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def _rows(
    path: Path, reading: Reading, findings: Findings, on_bytes: OnBytes
) -> Iterator[tuple[str]]:
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
    """Bytes that all columns unpack to, as the file says, and no less than it has."""
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
