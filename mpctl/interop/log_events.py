"""What a log says besides its steps: memory, and lines that tell why a step took longer.

Memory is the most that any rank printed, in bytes: Megatron-LM's MB are 2^20 bytes
(megatron/training/utils.py, report_memory), DeepSpeed's GB 2^30 (deepspeed/utils/timer.py),
torchtitan's GiB what its allocator reserved. An event is counted with the step before its first and
its last line.

>>> events = LogEvents()
>>> events.read("step: 10 memory: 70.00GiB(88.09%) tps: 100", 10)
>>> events.read("3 CUDA memory allocation retries.", 10)
>>> events.memory["reserved"] / 2**30, events.found["retries"].total
(70.0, 3)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

LONGEST = 160
_SIZE = r" ?:? ?=?(\d{1,15}(?:\.\d{1,6})?)"
_MEMORY = (
    ("memory (MB)", "allocated", re.compile(rf"max allocated{_SIZE}"), 2**20),
    ("memory (MB)", "reserved", re.compile(rf"max reserved{_SIZE}"), 2**20),
    ("memory (MB)", "reserved", re.compile(rf"\| reserved{_SIZE}"), 2**20),
    ("MaxMemAllocated", "allocated", re.compile(rf"MaxMemAllocated{_SIZE}GB"), 2**30),
    ("GiB(", "reserved", re.compile(rf"memory:{_SIZE}GiB\("), 2**30),
    ("peak_memory_usage", "allocated", re.compile(rf"peak_memory_usage{_SIZE}"), 1),
)
"""A word of the line, the kind of memory, its number, and bytes of one."""
_EVENTS = (
    ("allocation retries", "retries", re.compile(r"(\d{1,6}) CUDA memory allocation retries")),
    ("cache flush", "flushes", re.compile(r"(\d{1,6}) pytorch allocator cache flush")),
    ("NET/Socket", "sockets", re.compile(r"NET/Socket ?: ?Using")),
    ("libibverbs", "sockets", re.compile(r"Failed to open libibverbs")),
    ("async event", "port", re.compile(r"async event ?: ?(?:port error|\w{0,40}link down)")),
    ("[GC]", "collections", re.compile(r"\[GC\]")),
    ("MxRtt/Rnk", "straggler", re.compile(r"MxRtt/Rnk: ?[\d.]{1,12} ?ms/\d{1,7}")),
)


class LogEvent(NamedTuple):
    """Lines of one kind. total: of them, or the sum of the numbers in them; first, last: the steps
    before them; text: the first line, shortened."""

    total: int
    lines: int
    first: int
    last: int
    text: str


@dataclass
class LogEvents:
    """memory: the most bytes `allocated` and `reserved`. found: events by name: retries and flushes of
    the allocator, sockets, port, collections, straggler."""

    memory: dict[str, float] = field(default_factory=dict)
    found: dict[str, LogEvent] = field(default_factory=dict)

    def read(self, text: str, step: int) -> None:
        """Add what a line says. step: the number of the newest step."""
        for word, kind, pattern, unit in _MEMORY:
            if word in text and (number := pattern.search(text)) is not None:
                self.memory[kind] = max(self.memory.get(kind, 0.0), float(number[1]) * unit)
        for word, name, pattern in _EVENTS:
            if word in text and (found := pattern.search(text)) is not None:
                count = int(found[1]) if pattern.groups else 1
                before = self.found.get(name) or LogEvent(0, 0, step, step, text.strip()[:LONGEST])
                self.found[name] = before._replace(total=before.total + count, lines=before.lines + 1, last=step)
