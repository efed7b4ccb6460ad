"""A stream as lines of bounded length, and a line as a JSON object: the input is untrusted.

By hand, `{"id": 1}` is a row; an empty line, a list, NaN, bytes that are not UTF-8, brackets nested
thousands deep or more than a MiB are issues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

from mpctl.errors import InputError

Raw = dict[str, Any]
LONGEST_LINE = 2**20  # bytes; a job is some two thousand


def read_lines(
    stream: BinaryIO, on_bytes: Callable[[int], None] | None = None
) -> Iterator[bytes | None]:
    """The lines without their ends; None in place of one longer than LONGEST_LINE.

    on_bytes: called with the bytes of each line that was read.
    """
    while line := stream.readline(LONGEST_LINE + 1):
        size = len(line)
        whole: bytes | None = line
        while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            whole, line = None, stream.readline(LONGEST_LINE + 1)
            size += len(line)
        if on_bytes is not None:
            on_bytes(size)
        yield whole if whole is None else whole.rstrip(b"\r\n")


def parse_line(line: bytes | None, number: int) -> Raw:
    """The JSON object on line `number`; None is a line too long to be read. Raises InputError."""
    where = f"line {number}"
    if line is None:
        raise InputError.of("line-too-long", where, f"more than {LONGEST_LINE:,} bytes",
                            "a line is one job; long ones are no job")  # fmt: skip
    if not line.strip():
        raise InputError.of("empty-line", where, "holds no job", "leave it out")
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise InputError.of("bad-encoding", where, f"is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise InputError.of("bad-syntax", where, "is nested too deeply") from None
    except ValueError as error:
        raise InputError.of("bad-syntax", where, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InputError.of("bad-syntax", where, f"is a JSON {type(row).__name__}, not an object",
                            'write {"id": ..., "model": {...}, ...}')  # fmt: skip
    return row


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")
