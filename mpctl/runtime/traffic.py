"""Counting what a rank really sends, so that the run can be held against its plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mpctl.transport.group import Collective


@dataclass
class TrafficCounter:
    """Collectives since the last `clear`, by axis and kind."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def record(self, collective: Collective) -> None:
        key = (collective.axis, collective.kind)
        self.counts[key] += 1
        self.bytes[key] += collective.bytes

    def clear(self) -> None:
        self.counts.clear()
        self.bytes.clear()

    def snapshot(self) -> dict[str, dict[str, int]]:
        """`{"tp all_reduce": {"count": 12, "bytes": 3145728}}`, whole messages."""
        return {
            f"{axis} {kind}": {"count": self.counts[axis, kind], "bytes": total}
            for (axis, kind), total in sorted(self.bytes.items())
        }
