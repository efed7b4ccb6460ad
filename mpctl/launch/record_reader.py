"""Follows RUN/metrics.jsonl, or RUN/answers.jsonl of a bench, while rank 0 appends to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpctl.rundir.metrics import parse_record
from mpctl.rundir.rank_files import StepRecord

OnRecord = Callable[[StepRecord], None]
OnAnswer = Callable[[Any], None]


@dataclass
class RecordReader:
    """Hands out each complete line of a metrics.jsonl once, from the end that it has now.

    parse: the record in a line, None for a line that is none; offset: bytes read so far; delivered:
    records handed out.
    """

    path: Path
    parse: Callable[[bytes], Any] = parse_record
    offset: int = 0
    delivered: int = 0

    def __post_init__(self) -> None:
        self.offset = self.path.stat().st_size if self.path.exists() else 0

    def deliver(self, on_record: OnRecord | OnAnswer) -> None:
        """Call on_record with every new record; a file that was removed or cut is read from its
        start."""
        try:
            stream = self.path.open("rb")
        except OSError:
            return
        with stream:
            self.offset *= self.offset <= os.fstat(stream.fileno()).st_size
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                record = self.parse(line)
                if record is not None:
                    self.delivered += 1
                    on_record(record)


def parse_answer(line: bytes) -> Any | None:
    """The answer in a line of answers.jsonl; None for a line that is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
