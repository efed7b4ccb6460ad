"""Counts what a rank really sends, so that the run can be compared with its plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mpctl.rundir.rank_files import Traffic
from mpctl.transport.timing import Collective


@dataclass
class TrafficCounter:
    """Collectives since the last `clear`, by axis and kind."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def record(self, collective: Collective) -> None:
        """Count one collective."""
        key = (collective.axis, collective.kind)
        self.counts[key] += 1
        self.bytes[key] += collective.bytes

    def clear(self) -> None:
        """Count from 0 again."""
        self.counts.clear()
        self.bytes.clear()

    def snapshot(self) -> Traffic:
        """By axis and kind, `{"tp all_reduce": {"count": 12, "bytes": 3145728}}`; bytes of full
        messages (transport/messages.py)."""
        return {
            f"{axis} {kind}": {"count": self.counts[axis, kind], "bytes": total}
            for (axis, kind), total in sorted(self.bytes.items())
        }
